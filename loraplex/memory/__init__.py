"""Where adapters' weights are: `space/` (bytes), `weights/` (copies), `residency/` (tiers), `care/` (health); `manager.py` above."""
