"""Bytes: the arena's chunks, extents in them, moves, and freed memory that a step may still read."""
