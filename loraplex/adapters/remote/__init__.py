"""Adapters that are fetched: repositories of the Hugging Face hub, prefixes of an object store."""
