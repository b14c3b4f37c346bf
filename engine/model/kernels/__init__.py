"""Kernels of the CUDA forward pass: Triton here, CUDA C++ in the .cu files beside it."""
