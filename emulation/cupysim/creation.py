"""Making arrays, and moving them between host and device."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from emulation.cupysim import client as client_module
from emulation.cupysim.cuda.stream import Stream, current_stream_ptr
from emulation.cupysim.ndarray import Shape, ndarray
from emulation.cupysim.region import Array


def empty(shape: Shape, dtype: npt.DTypeLike = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def zeros(shape: Shape, dtype: npt.DTypeLike = float, order: str = "C") -> ndarray:
    made = ndarray(shape, dtype, order=order)
    if made.nbytes:
        client_module.current().post("fill", current_stream_ptr(), made.data.ptr, 0, made.nbytes)
    return made


def full(shape: Shape, fill_value: Any, dtype: npt.DTypeLike | None = None) -> ndarray:
    if dtype is None:
        dtype = (
            fill_value.dtype
            if isinstance(fill_value, (ndarray, np.generic))
            else np.asarray(fill_value).dtype
        )
    made = ndarray(shape, dtype)
    made.fill(fill_value)
    return made


def ones(shape: Shape, dtype: npt.DTypeLike = float) -> ndarray:
    return full(shape, 1, dtype)


def _like(a: ndarray | Array, dtype: npt.DTypeLike | None, shape: Shape | None) -> Any:
    return (a.shape if shape is None else shape), (a.dtype if dtype is None else dtype)


def empty_like(
    prototype: ndarray | Array, dtype: npt.DTypeLike | None = None, shape: Shape | None = None
) -> ndarray:
    return empty(*_like(prototype, dtype, shape))


def zeros_like(
    a: ndarray | Array, dtype: npt.DTypeLike | None = None, shape: Shape | None = None
) -> ndarray:
    return zeros(*_like(a, dtype, shape))


def ones_like(
    a: ndarray | Array, dtype: npt.DTypeLike | None = None, shape: Shape | None = None
) -> ndarray:
    return ones(*_like(a, dtype, shape))


def full_like(a: ndarray | Array, fill_value: Any, dtype: npt.DTypeLike | None = None) -> ndarray:
    shape, resolved = _like(a, dtype, None)
    return full(shape, fill_value, resolved)


def arange(*limits: Any, dtype: npt.DTypeLike | None = None) -> ndarray:
    return asarray(np.arange(*limits, dtype=dtype))


def asarray(a: Any, dtype: npt.DTypeLike | None = None) -> ndarray:
    """`a` itself where it is a device array of that type already."""
    if isinstance(a, ndarray):
        return a if dtype is None else a.astype(dtype, copy=False)
    host = np.asarray(a, dtype)
    if host.dtype.hasobject:
        raise ValueError(f"Unsupported dtype {host.dtype}")
    made = ndarray(host.shape, host.dtype)
    made.set(np.ascontiguousarray(host).reshape(host.shape))
    return made


def array(obj: Any, dtype: npt.DTypeLike | None = None, copy: bool = True) -> ndarray:
    if isinstance(obj, ndarray):
        return obj.astype(obj.dtype if dtype is None else dtype, copy=copy)
    if isinstance(obj, (list, tuple)) and any(isinstance(item, ndarray) for item in obj):
        raise TypeError("cupysim builds arrays from host data: stack device arrays by concatenate")
    return asarray(obj, dtype)


def ascontiguousarray(a: Any, dtype: npt.DTypeLike | None = None) -> ndarray:
    made = asarray(a, dtype)
    return made if made.flags.c_contiguous else made.copy()


def asnumpy(
    a: Any, stream: Stream | None = None, order: str = "C", out: Array | None = None
) -> Array:
    """A NumPy copy of a device array; anything else by numpy.asarray."""
    if isinstance(a, ndarray):
        copied: Array = a.get(stream, order, out)
        return copied
    host = np.asarray(a)
    if out is None:
        return host
    out[...] = host
    return out
