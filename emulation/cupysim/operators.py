"""The operators of device arrays, each one of NumPy's ufuncs."""

from __future__ import annotations

from typing import Any


def _plain(ufunc: str) -> Any:
    def apply(self: Any, *others: Any) -> Any:
        from emulation.cupysim.elementwise import apply_ufunc

        return apply_ufunc(ufunc, (self, *others))

    return apply


def _reflected(ufunc: str) -> Any:
    def apply(self: Any, other: Any) -> Any:
        from emulation.cupysim.elementwise import apply_ufunc

        return apply_ufunc(ufunc, (other, self))

    return apply


def _in_place(ufunc: str) -> Any:
    def apply(self: Any, other: Any) -> Any:
        from emulation.cupysim.elementwise import apply_ufunc

        return apply_ufunc(ufunc, (self, other), self)

    return apply


class DeviceArray:
    """Base of ndarray: nothing but operators."""

    __array_priority__ = 100
    __hash__ = None  # type: ignore[assignment]

    __add__: Any = _plain("add")
    __sub__: Any = _plain("subtract")
    __mul__: Any = _plain("multiply")
    __truediv__: Any = _plain("true_divide")
    __floordiv__: Any = _plain("floor_divide")
    __mod__: Any = _plain("remainder")
    __pow__: Any = _plain("power")
    __and__: Any = _plain("bitwise_and")
    __or__: Any = _plain("bitwise_or")
    __xor__: Any = _plain("bitwise_xor")
    __lshift__: Any = _plain("left_shift")
    __rshift__: Any = _plain("right_shift")

    __radd__: Any = _reflected("add")
    __rsub__: Any = _reflected("subtract")
    __rmul__: Any = _reflected("multiply")
    __rtruediv__: Any = _reflected("true_divide")
    __rfloordiv__: Any = _reflected("floor_divide")
    __rmod__: Any = _reflected("remainder")
    __rpow__: Any = _reflected("power")
    __rand__: Any = _reflected("bitwise_and")
    __ror__: Any = _reflected("bitwise_or")
    __rxor__: Any = _reflected("bitwise_xor")
    __rlshift__: Any = _reflected("left_shift")
    __rrshift__: Any = _reflected("right_shift")

    __iadd__: Any = _in_place("add")
    __isub__: Any = _in_place("subtract")
    __imul__: Any = _in_place("multiply")
    __itruediv__: Any = _in_place("true_divide")
    __ifloordiv__: Any = _in_place("floor_divide")
    __imod__: Any = _in_place("remainder")
    __ipow__: Any = _in_place("power")
    __iand__: Any = _in_place("bitwise_and")
    __ior__: Any = _in_place("bitwise_or")
    __ixor__: Any = _in_place("bitwise_xor")
    __ilshift__: Any = _in_place("left_shift")
    __irshift__: Any = _in_place("right_shift")

    __eq__: Any = _plain("equal")
    __ne__: Any = _plain("not_equal")
    __lt__: Any = _plain("less")
    __le__: Any = _plain("less_equal")
    __gt__: Any = _plain("greater")
    __ge__: Any = _plain("greater_equal")

    __neg__: Any = _plain("negative")
    __pos__: Any = _plain("positive")
    __abs__: Any = _plain("absolute")
    __invert__: Any = _plain("invert")
