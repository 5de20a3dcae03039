"""The engine on a CUDA device: packed buffers, captured graphs, kernels. See docs/gpu.md."""
