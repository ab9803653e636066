"""Where adapters' weights are: `space/` (bytes), `weights/` (copies), `residency/` (states), `eviction/`, `care/`;
`manager.py` above."""
