"""Checks and figures on an NVIDIA GPU; each script tries itself out in Triton's interpreter on a CPU with
--interpret."""
