"""Adapters by need, and uploads: over the sources and the store of `loraplex/adapters/sources`."""
