"""The kernels of the CPU, written in numba; docs/kernels.md says how one is read, changed and tested."""
