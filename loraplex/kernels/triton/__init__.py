"""Kernels in Triton, for NVIDIA GPUs; on a machine without one they run in Triton's interpreter (TRITON_INTERPRET=1),
for tests."""
