"""Calls of the CUDA runtime, checked. Needs cuda-bindings and nothing else of CUDA's libraries."""

from __future__ import annotations

from typing import Any

from cuda.bindings import runtime as cudart


class CudaError(RuntimeError):
    """A CUDA call failed; the message names the call and CUDA's reason."""


def checked(call: str, *arguments: Any) -> Any:
    """Call a function of the CUDA runtime; its result, or CudaError with the call's name."""
    error, *results = getattr(cudart, call)(*arguments)
    if error != cudart.cudaError_t.cudaSuccess:
        _, text = cudart.cudaGetErrorString(error)
        raise CudaError(f"{call} failed: {text.decode() if text else error}")
    return results[0] if len(results) == 1 else tuple(results) if results else None
