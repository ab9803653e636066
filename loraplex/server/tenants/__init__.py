"""What tenants change at the routes: names of a request, limits, usage, and the routes for tenants and keys."""
