"""Kernels of the sampler, for CPUs and GPUs."""
