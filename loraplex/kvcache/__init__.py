"""Paged KV memory: blocks with reference counts, a prefix cache per adapter and tenant, block tables per request."""
