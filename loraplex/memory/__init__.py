"""Adapters' weights: `space/` (bytes), `weights/` (copies), `residency/` (states), `eviction/`, `care/`, manager."""
