"""Joining, copying and picking elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from emulation.cupysim.creation import asarray
from emulation.cupysim.ndarray import enqueue, ndarray


def concatenate(
    tup: Sequence[ndarray], axis: int | None = 0, out: ndarray | None = None
) -> ndarray:
    arrays = list(tup)
    if not arrays or not all(isinstance(array, ndarray) for array in arrays):
        raise TypeError("concatenate needs device arrays, at least one")
    if axis is None:
        arrays, axis = [array.ravel() for array in arrays], 0
    axis = normalize_axis_index(axis, arrays[0].ndim)
    shape = np.concatenate([_stand_in(array, axis) for array in arrays], axis).shape
    lengths = sum(array.shape[axis] for array in arrays)
    shape = (*shape[:axis], lengths, *shape[axis + 1 :])
    made = out if out is not None else ndarray(shape, np.result_type(*(a.dtype for a in arrays)))
    addresses = [array.address for array in arrays]
    enqueue("function", "concatenate", (addresses, axis), {}, made.address)
    return made


def _stand_in(array: ndarray, axis: int) -> Any:
    """One slice along `axis`: NumPy checks with it that the other axes agree."""
    shape = (*array.shape[:axis], 1, *array.shape[axis + 1 :])
    return np.broadcast_to(np.int8(0), shape)


def copyto(dst: ndarray, src: Any) -> None:
    """Casts as numpy.copyto: within the same kind."""
    if isinstance(src, np.ndarray) and src.ndim:
        raise TypeError("Unsupported type numpy.ndarray: use asarray(src) or dst.set(src)")
    source_type = src.dtype if isinstance(src, (ndarray, np.generic)) else np.min_scalar_type(src)
    if not np.can_cast(source_type, dst.dtype, "same_kind"):
        raise TypeError(f"Cannot cast {source_type} to {dst.dtype} in same_kind casting mode")
    dst[...] = src


def take(a: ndarray, indices: Any, axis: int | None = None, out: ndarray | None = None) -> ndarray:
    """Indices out of bounds wrap around, as in CuPy."""
    picked = indices if isinstance(indices, ndarray) else asarray(indices)
    if picked.dtype.kind not in "iu":
        raise TypeError("take needs integer indices")
    if axis is None:
        shape = picked.shape
    else:
        axis = normalize_axis_index(axis, a.ndim)
        shape = (*a.shape[:axis], *picked.shape, *a.shape[axis + 1 :])
    made = ndarray(shape, a.dtype) if out is None else out
    options = {"axis": axis, "mode": "wrap"}
    enqueue("function", "take", (a.address, picked.address), options, made.address)
    return made
