"""Reductions over axes, with NumPy's result types."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_tuple

from emulation.cupysim.ndarray import enqueue, ndarray

_NO_IDENTITY = ("max", "min", "argmax", "argmin")


def reduce(
    name: str, array: ndarray, axis: Any, dtype: Any, out: ndarray | None, keepdims: bool
) -> ndarray:
    axes = range(array.ndim) if axis is None else normalize_axis_tuple(axis, array.ndim)
    if name in _NO_IDENTITY and any(array.shape[i] == 0 for i in axes):
        raise ValueError(f"zero-size array to reduction operation {name} which has no identity")
    kept = (1,) if keepdims else ()
    shape = tuple(n for i, n in enumerate(array.shape) for n in ((n,) if i not in axes else kept))
    options: dict[str, Any] = {"axis": axis, "keepdims": keepdims}
    if dtype is not None:
        options["dtype"] = np.dtype(dtype)
    sample = np.ones((1,) * max(array.ndim, 1), array.dtype)
    found = getattr(np, name)(sample, **{k: v for k, v in options.items() if k == "dtype"})
    if out is None:
        out = ndarray(shape, found.dtype)
    elif out.shape != shape:
        raise ValueError(f"out has shape {out.shape}, the result {shape}")
    enqueue("function", name, (array.address,), options, out.address)
    return out


def _function(name: str, *, with_dtype: bool = False) -> Any:
    def function(a: ndarray, axis: Any = None, **options: Any) -> ndarray:
        if not isinstance(a, ndarray):
            raise TypeError(f"Unsupported type {type(a)}")
        method: Any = getattr(a, name)
        result: ndarray = method(axis, **options)
        return result

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"numpy.{name} on a device array."
    return function


FUNCTIONS = {
    name: _function(name)
    for name in ("sum", "mean", "max", "min", "all", "any", "argmax", "argmin")
} | {"amax": _function("max"), "amin": _function("min")}
