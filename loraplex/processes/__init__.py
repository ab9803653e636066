"""Child processes: what they get of the environment, and those whose work is bounded."""
