"""Checks and figures on an NVIDIA GPU; with --interpret, each script runs in Triton's interpreter on a CPU."""
