"""Adapters' weights as bytes: packed, compressed, on disk, loaded from a source, copied to a device."""
