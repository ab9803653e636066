"""Where adapters' weights are: `space/` (bytes), `weights/` (forms and copies), `residency/` (tiers), `care/` (health),
and `manager.py` above them.
"""
