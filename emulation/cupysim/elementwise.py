"""Elementwise functions: NumPy's ufuncs by name, with NumPy's type rules."""

from __future__ import annotations

from typing import Any

import numpy as np

from emulation.cupysim.ndarray import enqueue, ndarray

_PYTHON_SCALARS = (bool, int, float, complex)


def _checked(value: Any) -> Any:
    if isinstance(value, (ndarray, np.generic, *_PYTHON_SCALARS)):
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0:
        return value[()]
    raise TypeError(f"Unsupported type {type(value)}")


def _type_of(value: Any) -> Any:
    """For type resolution: a dtype, or the Python type of a weakly typed scalar."""
    if isinstance(value, (ndarray, np.generic)):  # np.float64 is a Python float, too
        return value.dtype
    return np.dtype(np.bool_) if isinstance(value, bool) else type(value)


def _sent(value: Any, dtype: Any) -> Any:
    if isinstance(value, ndarray):
        return value.address
    if isinstance(value, np.generic):
        return value
    return dtype.type(value)  # raises OverflowError as NumPy does


def apply_ufunc(name: str, inputs: tuple[Any, ...], out: ndarray | None = None) -> ndarray:
    ufunc: np.ufunc = getattr(np, name)
    inputs = tuple(_checked(value) for value in inputs)
    types = [_type_of(value) for value in inputs]
    resolved = ufunc.resolve_dtypes((*types, None if out is None else out.dtype))
    shape = np.broadcast_shapes(
        *(value.shape if isinstance(value, ndarray) else () for value in inputs)
    )
    if out is None:
        out = ndarray(shape, resolved[-1])
    elif out.shape != np.broadcast_shapes(shape, out.shape):
        raise ValueError(f"non-broadcastable output operand with shape {out.shape}")
    operands = tuple(
        _sent(value, dtype) for value, dtype in zip(inputs, resolved[:-1], strict=True)
    )
    enqueue("ufunc", name, operands, out.address)
    return out


def _function(name: str) -> Any:
    def function(*inputs: Any, out: ndarray | None = None) -> ndarray:
        return apply_ufunc(name, inputs, out)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"numpy.{name} on device arrays."
    return function


UFUNCS = [
    "absolute",
    "add",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "ceil",
    "cos",
    "divide",
    "equal",
    "exp",
    "exp2",
    "expm1",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "invert",
    "isfinite",
    "isinf",
    "isnan",
    "left_shift",
    "less",
    "less_equal",
    "log",
    "log10",
    "log1p",
    "log2",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "negative",
    "not_equal",
    "power",
    "remainder",
    "right_shift",
    "rint",
    "sign",
    "sin",
    "sqrt",
    "square",
    "subtract",
    "tanh",
    "true_divide",
    "trunc",
]
FUNCTIONS = {name: _function(name) for name in UFUNCS}


def where(condition: ndarray, x: Any, y: Any) -> ndarray:
    x, y = _checked(x), _checked(y)
    condition = _checked(condition)
    types = [value.dtype if isinstance(value, (ndarray, np.generic)) else value for value in (x, y)]
    shape = np.broadcast_shapes(
        *(value.shape if isinstance(value, ndarray) else () for value in (condition, x, y))
    )
    made = ndarray(shape, np.result_type(*types))
    sent = tuple(_sent(value, made.dtype) for value in (condition, x, y))
    enqueue("function", "where", sent, {}, made.address)
    return made
