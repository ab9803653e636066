"""Tenants of one server: their keys and roles, what each may see, what it may use, and what it has used."""
