"""NumPy operations as the device process runs them: in stream order, over device memory.

Each maker turns a request's arguments into a call without arguments; views of device memory are
made once, when the operation is enqueued or captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from emulation.cupysim.region import Array, ArrayAddress, RegionTable

Call = Callable[[], None]


def resolve(value: Any, regions: RegionTable) -> Any:
    """The value with every array address in it replaced by a view of device memory."""
    if isinstance(value, ArrayAddress):
        return regions.view(value)
    if isinstance(value, (list, tuple)):
        return type(value)(resolve(item, regions) for item in value)
    return value


def make_ufunc(name: str, inputs: tuple[Any, ...], out: Array) -> Call:
    function: np.ufunc = getattr(np, name)

    def call() -> None:
        function(*inputs, out=out)

    return call


def make_assign(target: Array, value: Any) -> Call:
    def assign() -> None:
        target[...] = value  # casts whatever the types

    return assign


def make_function(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Array) -> Call:
    function = getattr(np, name)

    def call() -> None:
        out[...] = function(*args, **kwargs)

    return call


def _wrapped(key: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Integer index arrays modulo their axis: a GPU gather wraps, it does not raise."""
    axis = 0
    wrapped: list[Any] = []
    taken = sum(_axes_of(item) for item in key)
    for item in key:
        if item is Ellipsis:
            axis += len(shape) - taken
        elif isinstance(item, np.ndarray) and item.dtype != np.bool_:
            item = item % shape[axis] if shape[axis] else item
            axis += 1
        else:
            axis += _axes_of(item)
        wrapped.append(item)
    return tuple(wrapped)


def _axes_of(item: Any) -> int:
    if item is None or item is Ellipsis:
        return 0
    if isinstance(item, np.ndarray) and item.dtype == np.bool_:
        return item.ndim
    return 1


def make_gather(source: Array, key: tuple[Any, ...], out: Array) -> Call:
    def gather() -> None:
        out[...] = source[_wrapped(key, source.shape)]

    return gather


def make_scatter(target: Array, key: tuple[Any, ...], value: Any) -> Call:
    def scatter() -> None:
        target[_wrapped(key, target.shape)] = value

    return scatter


MAKERS: dict[str, Callable[..., Call]] = {
    "ufunc": make_ufunc,
    "assign": make_assign,
    "function": make_function,
    "gather": make_gather,
    "scatter": make_scatter,
}
