"""cupy.ndarray over the simulated device.

Shapes, strides and basic indexing are NumPy's own: an array holds a NumPy view of the client's
mapping of device memory, never read except by `get`. Everything that touches values is enqueued
on the current stream and runs in the device process.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from emulation.cupysim import client as client_module
from emulation.cupysim.cuda.device import Device
from emulation.cupysim.cuda.memory import MemoryPointer, alloc
from emulation.cupysim.cuda.stream import Stream, current_stream_ptr
from emulation.cupysim.indexing import (
    advanced_key,
    basic_view,
    gathered_shape,
    is_basic,
    key_parts,
    on_device,
)
from emulation.cupysim.operators import DeviceArray
from emulation.cupysim.region import Array, ArrayAddress
from emulation.cupysim.wire import INLINE_BYTES

Shape = int | tuple[int, ...]
INLINE_SET_BYTES = INLINE_BYTES // 2  # larger host arrays are written through the mapping


class ndarray(DeviceArray):  # noqa: N801 - CuPy's name
    """An array in device memory. The contents of a new one are undefined."""

    def __init__(
        self,
        shape: Shape,
        dtype: npt.DTypeLike = float,
        memptr: MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
        order: str = "C",
    ) -> None:
        shape = (int(shape),) if np.isscalar(shape) else tuple(int(n) for n in shape)  # type: ignore[arg-type,union-attr]
        resolved: np.dtype[Any] = np.dtype(dtype)
        if resolved.hasobject:
            raise ValueError("device memory cannot hold Python objects")
        if order not in ("C", "K", "A"):
            raise ValueError(f"order={order!r}: cupysim makes C-ordered arrays")
        if memptr is None:
            memptr = alloc(math.prod(shape) * resolved.itemsize)
        if strides is None:
            strides = _c_strides(shape, resolved.itemsize)
        address = ArrayAddress(memptr.ptr, resolved, shape, strides)
        self.data = memptr
        self._view: Array = client_module.current().regions.view(address)
        self.base: ndarray | None = None

    @classmethod
    def _of_view(cls, parent: ndarray, view: Array) -> ndarray:
        """An array over memory of `parent`, which stays alive with it."""
        array = cls.__new__(cls)
        offset = int(view.ctypes.data) - int(parent._view.ctypes.data) if view.size else 0
        array.data = parent.data + offset
        array._view = view
        array.base = parent if parent.base is None else parent.base
        return array

    # ---- attributes -----------------------------------------------------------------------

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._view.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._view.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self._view.strides

    @property
    def ndim(self) -> int:
        return self._view.ndim

    @property
    def size(self) -> int:
        return self._view.size

    @property
    def itemsize(self) -> int:
        return self._view.itemsize

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    @property
    def flags(self) -> Any:
        return self._view.flags

    @property
    def device(self) -> Device:
        return Device(0)

    @property
    def T(self) -> ndarray:  # noqa: N802
        return self.transpose()

    @property
    def address(self) -> ArrayAddress:
        """What the device process needs to see this array."""
        return ArrayAddress(self.data.ptr, self.dtype, self.shape, self.strides)

    # ---- host transfers -------------------------------------------------------------------

    def get(
        self,
        stream: Stream | None = None,
        order: str = "C",
        out: Array | None = None,
        blocking: bool = True,
    ) -> Any:
        """A NumPy copy, after all that `stream` (else the current stream) has been given.
        It always blocks: `blocking=False` is allowed to."""
        ptr = current_stream_ptr() if stream is None else stream.ptr
        client_module.current().request("sync", ptr)
        if out is None:
            return np.array(self._view, order="F" if order == "F" else "C", copy=True)
        if out.dtype != self.dtype or out.shape != self.shape:
            raise ValueError(
                f"out has {out.dtype}{out.shape}, the array {self.dtype}{self.shape}: "
                "both must be the same"
            )
        out[...] = self._view
        return out

    def set(self, arr: Array, stream: Stream | None = None) -> None:
        """Copies a NumPy array of the same dtype and shape into this one, in stream order."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if arr.shape != self.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        client = client_module.current()
        ptr = current_stream_ptr() if stream is None else stream.ptr
        if arr.nbytes <= INLINE_SET_BYTES and self._view.flags.c_contiguous:
            if arr.nbytes:
                client.post("data", ptr, self.data.ptr, arr.tobytes())
            return
        client.request("sync", ptr)
        self._view[...] = arr

    def __array__(self, dtype: object = None, copy: object = None) -> NoReturn:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def item(self, *args: int) -> Any:
        return self.get().item(*args)

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self) -> bytes:
        return bytes(self.get().tobytes())

    def __int__(self) -> int:
        return int(self.get().item())

    def __float__(self) -> float:
        return float(self.get().item())

    def __bool__(self) -> bool:
        return bool(self.get())

    def __index__(self) -> int:
        return int(self.get().item().__index__())

    def __repr__(self) -> str:
        return repr(self.get())

    def __str__(self) -> str:
        return str(self.get())

    # ---- shapes: views where NumPy makes views ---------------------------------------------

    def __len__(self) -> int:
        if self.ndim == 0:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[ndarray]:
        return (self[index] for index in range(len(self)))

    def view(self, dtype: npt.DTypeLike | None = None) -> ndarray:
        made = self._view.view() if dtype is None else self._view.view(dtype)
        return ndarray._of_view(self, made)

    def reshape(self, *shape: Any, order: str = "C") -> ndarray:
        """A view where the strides allow it, else a copy."""
        wanted = shape[0] if len(shape) == 1 else shape
        try:
            return ndarray._of_view(self, self._view.reshape(wanted, copy=False))
        except ValueError:
            if self._view.flags.c_contiguous:
                raise
        return self.copy().reshape(wanted)

    def ravel(self, order: str = "C") -> ndarray:
        return self.reshape(-1)

    def flatten(self, order: str = "C") -> ndarray:
        return self.copy().reshape(-1)

    def transpose(self, *axes: Any) -> ndarray:
        return ndarray._of_view(self, self._view.transpose(*axes))

    def squeeze(self, axis: Any = None) -> ndarray:
        return ndarray._of_view(self, self._view.squeeze(axis))

    def swapaxes(self, first: int, second: int) -> ndarray:
        return ndarray._of_view(self, self._view.swapaxes(first, second))

    def copy(self, order: str = "C") -> ndarray:
        return self.astype(self.dtype)

    def astype(self, dtype: npt.DTypeLike, order: str = "K", copy: bool = True) -> ndarray:
        if not copy and self.dtype == np.dtype(dtype):
            return self
        made = ndarray(self.shape, dtype)
        enqueue("assign", made.address, self.address)
        return made

    def fill(self, value: Any) -> None:
        if isinstance(value, ndarray):
            value = value.address
        enqueue("assign", self.address, value)

    # ---- indexing -------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> ndarray:
        if isinstance(key, str) or is_basic(key):
            return ndarray._of_view(self, basic_view(self._view, key))
        parts = advanced_key(key)
        shape = gathered_shape(self.shape, parts)
        made = ndarray(shape, self.dtype)
        enqueue("gather", self.address, on_device(parts), made.address)
        return made

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            target = self[key] if isinstance(key, str) or is_basic(key) else None
            if target is None:
                raise TypeError("values for an advanced index must be device arrays")
            target.set(np.broadcast_to(value, target.shape).astype(target.dtype))
            return
        if isinstance(value, np.ndarray):
            value = value[()]
        elif isinstance(value, ndarray):
            value = value.address
        if isinstance(key, str) or is_basic(key):
            target = self[key]
            if isinstance(value, ArrayAddress):
                np.broadcast_shapes(value.shape, target.shape)
            enqueue("assign", target.address, value)
        else:
            enqueue("scatter", self.address, on_device(key_parts(key)), value)

    # ---- values: see elementwise.py and reduction.py ---------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        from emulation.cupysim.elementwise import apply_ufunc

        out = kwargs.pop("out", None)
        if method != "__call__" or kwargs:
            raise TypeError(f"numpy.{ufunc.__name__} of device arrays takes no method or options")
        return apply_ufunc(ufunc.__name__, inputs, out[0] if out else None)

    def _reduce(self, name: str, axis: Any, dtype: Any, out: Any, keepdims: bool) -> ndarray:
        from emulation.cupysim.reduction import reduce

        return reduce(name, self, axis, dtype, out, keepdims)

    def sum(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> ndarray:
        return self._reduce("sum", axis, dtype, out, keepdims)

    def mean(
        self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False
    ) -> ndarray:
        return self._reduce("mean", axis, dtype, out, keepdims)

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce("max", axis, None, out, keepdims)

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce("min", axis, None, out, keepdims)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce("all", axis, None, out, keepdims)

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce("any", axis, None, out, keepdims)

    def argmax(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce("argmax", axis, None, out, keepdims)

    def argmin(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> ndarray:
        return self._reduce("argmin", axis, None, out, keepdims)

    def take(self, indices: Any, axis: int | None = None, out: Any = None) -> ndarray:
        from emulation.cupysim.manipulation import take

        return take(self, indices, axis, out)


def enqueue(maker: str, *arguments: Any) -> None:
    """One NumPy operation on the current stream."""
    client_module.current().post("array", current_stream_ptr(), maker, arguments)


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides: list[int] = []
    step = itemsize
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))
