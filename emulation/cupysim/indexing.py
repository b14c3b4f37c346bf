"""Index keys of device arrays: which are views, and what a gather of the others looks like."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulation.cupysim.operators import DeviceArray
from emulation.cupysim.region import Array


def _on_device(part: Any) -> bool:
    return isinstance(part, DeviceArray)


def key_parts(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def is_basic(key: Any) -> bool:
    """Whether NumPy would answer with a view."""
    return all(
        part is None
        or part is Ellipsis
        or (isinstance(part, (slice, int, np.integer)) and not isinstance(part, (bool, np.bool_)))
        for part in key_parts(key)
    )


def basic_view(view: Array, key: Any) -> Array:
    """A view even where NumPy would answer with a scalar: a 0-d array, as CuPy has it."""
    if isinstance(key, str):
        return view[key]  # a field of a structured array
    parts = key_parts(key)
    made: Array = view[parts if Ellipsis in parts else (*parts, Ellipsis)]
    return made


def advanced_key(key: Any) -> tuple[Any, ...]:
    """Parts with lists as NumPy arrays and boolean masks as integer arrays (which needs their
    values: it waits for the current stream, as in CuPy)."""
    parts: list[Any] = []
    for part in key_parts(key):
        if isinstance(part, list):
            part = np.asarray(part)
        if _on_device(part) and part.dtype == np.bool_:
            part = part.get()
        if isinstance(part, np.ndarray) and part.dtype == np.bool_:
            parts.extend(np.nonzero(part))
        else:
            parts.append(part)
    return tuple(parts)


def gathered_shape(shape: tuple[int, ...], parts: tuple[Any, ...]) -> tuple[int, ...]:
    stand_ins = tuple(
        np.zeros(part.shape, np.intp) if _on_device(part) or isinstance(part, np.ndarray) else part
        for part in parts
    )
    return tuple(np.broadcast_to(np.int8(0), shape)[stand_ins].shape)


def on_device(parts: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        part.address if _on_device(part) else np.asarray(part) if isinstance(part, list) else part
        for part in parts
    )
