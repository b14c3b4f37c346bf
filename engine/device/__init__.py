"""The CUDA device: kernels built by nvcc, memory, step graphs that launch each other."""
