"""Kernels written by hand, where the compiler's own cost much more: Pallas for GPUs, LLVM for CPUs."""
