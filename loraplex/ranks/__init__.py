"""Tensor parallelism over processes: the engine's own is rank 0 and leads, the others follow it (docs/adr/0053)."""
