"""The native CPU backend: C++ kernels (csrc/) behind a C ABI, called through ctypes."""
