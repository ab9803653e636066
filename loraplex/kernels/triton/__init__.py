"""Kernels in Triton, for NVIDIA GPUs; tests without one run them in Triton's interpreter (TRITON_INTERPRET=1)."""
