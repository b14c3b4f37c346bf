"""The supported array API against NumPy: the same programs on device arrays and on host arrays.

BLINKBED_XP=cupy runs the same file against real CuPy, where a GPU and CuPy exist.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

XP = os.environ.get("BLINKBED_XP", "emulation.cupysim")
xp: Any = importlib.import_module(XP)
needs_simulator = pytest.mark.skipif(
    XP == "cupy", reason="real CuPy refuses structured dtypes and has no device process"
)

rng = np.random.default_rng(7)
MATRIX = rng.normal(size=(4, 6)).astype(np.float32)
OTHER = rng.normal(size=(4, 6)).astype(np.float32)
COUNTS = rng.integers(-50, 50, size=(4, 6)).astype(np.int32)
CUBE = rng.integers(0, 9, size=(2, 3, 4)).astype(np.int64)
HALF = MATRIX.astype(np.float16)
BYTES = rng.integers(0, 255, size=24, dtype=np.uint8)

Program = Callable[..., Any]
PROGRAMS: dict[str, tuple[Program, tuple[Any, ...]]] = {
    "add": (lambda m, a, b: a + b, (MATRIX, OTHER)),
    "add int and float": (lambda m, a, b: a + b, (MATRIX, COUNTS)),
    "python scalars stay weak": (lambda m, a: (a * 2 + 1) / 3, (MATRIX,)),
    "half with a python float": (lambda m, a: a * 0.5, (HALF,)),
    "numpy scalars are strong": (lambda m, a: a + np.float64(1.5), (MATRIX,)),
    "numpy scalar on the left": (lambda m, a: np.float32(3) - a, (MATRIX,)),
    "python scalar on the left": (lambda m, a: 3 - a, (COUNTS,)),
    "integer division": (lambda m, a: a // 7, (COUNTS,)),
    "remainder": (lambda m, a: a % 7, (COUNTS,)),
    "true division of integers": (lambda m, a: a / 4, (COUNTS,)),
    "power": (lambda m, a: a**2, (MATRIX,)),
    "bits": (lambda m, a: ((a & 6) | 1) ^ 3, (CUBE,)),
    "shifts": (lambda m, a: (a << 3) >> 1, (CUBE,)),
    "negative": (lambda m, a: -a, (MATRIX,)),
    "invert": (lambda m, a: ~(a > 0), (MATRIX,)),
    "absolute": (lambda m, a: abs(a), (COUNTS,)),
    "comparisons": (lambda m, a, b: (a < b) & (a != 0) | (a >= b), (MATRIX, OTHER)),
    "equality": (lambda m, a: a == a, (COUNTS,)),
    "broadcasting": (lambda m, a, b: a[:, None, :] * b[None, :2], (MATRIX, OTHER)),
    "exp": (lambda m, a: m.exp(a), (MATRIX,)),
    "sqrt": (lambda m, a: m.sqrt(m.absolute(a)), (MATRIX,)),
    "log of a negative is nan": (lambda m, a: m.isnan(m.log(a)), (MATRIX,)),
    "where": (lambda m, a, b: m.where(a > 0, a, b), (MATRIX, OTHER)),
    "where with a scalar": (lambda m, a: m.where(a > 0, a, 0), (MATRIX,)),
    "maximum": (lambda m, a, b: m.maximum(a, b), (MATRIX, OTHER)),
    "minimum with a scalar": (lambda m, a: m.minimum(a, 0.25), (MATRIX,)),
    "sum": (lambda m, a: a.sum(), (CUBE,)),
    "sum of int32 widens": (lambda m, a: a.sum(axis=1), (COUNTS,)),
    "sum of bool counts": (lambda m, a: (a > 0).sum(axis=0), (MATRIX,)),
    "sum over axes": (lambda m, a: a.sum(axis=(0, 2), keepdims=True), (CUBE,)),
    "sum with a dtype": (lambda m, a: m.sum(a, axis=-1, dtype=np.float64), (MATRIX,)),
    "max": (lambda m, a: a.max(axis=0), (MATRIX,)),
    "min": (lambda m, a: m.min(a), (COUNTS,)),
    "mean": (lambda m, a: a.mean(axis=1), (CUBE,)),
    "argmax": (lambda m, a: a.argmax(axis=1), (MATRIX,)),
    "argmax of all": (lambda m, a: m.argmax(a), (MATRIX,)),
    "any and all": (lambda m, a: m.any(a > 1, axis=0) & m.all(a > -9, axis=0), (MATRIX,)),
    "slices": (lambda m, a: a[1:, ::2], (MATRIX,)),
    "negative steps": (lambda m, a: a[::-1, ::-2], (MATRIX,)),
    "one element": (lambda m, a: a[2, 3], (MATRIX,)),
    "new axes": (lambda m, a: a[..., None, 0], (CUBE,)),
    "integer arrays": (lambda m, a: a[m.asarray([3, 0, 0])], (MATRIX,)),
    "integer arrays and slices": (lambda m, a: a[:, m.asarray([1, 1, 0])], (CUBE,)),
    "pairs of integer arrays": (
        lambda m, a: a[m.asarray([0, 3]), m.asarray([5, 1])],
        (MATRIX,),
    ),
    "boolean mask": (lambda m, a: a[a > 0], (MATRIX,)),
    "reshape": (lambda m, a: a.reshape(3, -1), (MATRIX,)),
    "reshape of a transpose": (lambda m, a: a.T.reshape(-1), (MATRIX,)),
    "transpose": (lambda m, a: a.transpose(2, 0, 1), (CUBE,)),
    "ravel": (lambda m, a: a[:, 1:3].ravel(), (CUBE,)),
    "astype": (lambda m, a: a.astype(np.int16), (MATRIX,)),
    "astype bool": (lambda m, a: a.astype(bool), (COUNTS,)),
    "view": (lambda m, a: a.view(np.uint32), (MATRIX,)),
    "view of bytes": (lambda m, a: a.view(np.uint16), (BYTES,)),
    "copy of a slice": (lambda m, a: a[:, 1].copy(), (MATRIX,)),
    "concatenate": (lambda m, a, b: m.concatenate([a, b[:2]]), (MATRIX, OTHER)),
    "concatenate along 1": (lambda m, a, b: m.concatenate((a, b), axis=1), (MATRIX, COUNTS)),
    "take": (lambda m, a: m.take(a, m.asarray([1, 3]), axis=1), (MATRIX,)),
    "take of all": (lambda m, a: a.take(m.asarray([[1], [9]])), (MATRIX,)),
    "zeros": (lambda m: m.zeros((2, 3), np.int32), ()),
    "ones": (lambda m: m.ones(3), ()),
    "full": (lambda m: m.full((2, 2), 7, np.uint8), ()),
    "full of a float": (lambda m: m.full(2, 1.5), ()),
    "zeros_like": (lambda m, a: m.zeros_like(a), (COUNTS,)),
    "arange": (lambda m: m.arange(2, 20, 3), ()),
    "arange of floats": (lambda m: m.arange(0, 1, 0.25, dtype=np.float32), ()),
    "array from lists": (lambda m: m.array([[1, 2], [3, 4]]), ()),
    "0-d array": (lambda m: m.asarray(3.5), ()),
    "empty selection": (lambda m, a: a[2:2] + 1, (MATRIX,)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_gives_what_numpy_gives(name: str) -> None:
    program, inputs = PROGRAMS[name]
    with np.errstate(all="ignore"):
        expected = np.asarray(program(np, *inputs))
    on_device = program(xp, *(xp.asarray(array) for array in inputs))
    assert isinstance(on_device, xp.ndarray)
    found = on_device.get()
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape == on_device.shape
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def _fill(a: Any, m: Any) -> None:
    a[...] = 3


def _fill_slice(a: Any, m: Any) -> None:
    a[1:3, ::2] = -1


def _from_array(a: Any, m: Any) -> None:
    a[0] = m.asarray(OTHER[1])


def _scatter(a: Any, m: Any) -> None:
    a[m.asarray([0, 2])] = m.asarray(OTHER[:2])


def _mask(a: Any, m: Any) -> None:
    a[a < 0] = 0


def _overlap(a: Any, m: Any) -> None:
    a[1:] = a[:-1]


def _in_place(a: Any, m: Any) -> None:
    a += 1
    a *= a
    a[:, 0] -= 5
    a /= 2


def _copyto(a: Any, m: Any) -> None:
    m.copyto(a, m.asarray(OTHER))


def _method_fill(a: Any, m: Any) -> None:
    a[:2].fill(9)


@pytest.mark.parametrize(
    "change",
    [_fill, _fill_slice, _from_array, _scatter, _mask, _overlap, _in_place, _copyto, _method_fill],
)
def test_change_in_place_gives_what_numpy_gives(change: Callable[[Any, Any], None]) -> None:
    expected = MATRIX.copy()
    change(expected, np)
    on_device = xp.asarray(MATRIX)
    change(on_device, xp)
    np.testing.assert_allclose(on_device.get(), expected, rtol=1e-6)


def test_set_and_get_keep_every_byte_of_small_and_large_arrays() -> None:
    for count in (0, 1, 1000, 300_000):
        host = rng.integers(0, 1 << 30, count)
        array = xp.empty(count, host.dtype)
        array.set(host)
        np.testing.assert_array_equal(array.get(), host)
        out = np.empty_like(host)
        assert xp.asnumpy(array, out=out) is out
        np.testing.assert_array_equal(out, host)


def test_set_refuses_another_dtype_or_shape() -> None:
    array = xp.zeros(4, np.int32)
    with pytest.raises(TypeError):
        array.set(np.zeros(4, np.int64))
    with pytest.raises(ValueError, match=r"[Ss]hape"):
        array.set(np.zeros(5, np.int32))


def test_attributes_are_numpys() -> None:
    array = xp.asarray(CUBE)
    for name in ("shape", "strides", "ndim", "size", "itemsize", "nbytes", "dtype"):
        assert getattr(array, name) == getattr(CUBE, name)
    assert len(array) == 2
    assert array.device.id == 0
    assert array[1, 1].data.ptr == array.data.ptr + CUBE.strides[0] + CUBE.strides[1]


def test_a_basic_slice_is_a_view_of_the_same_memory() -> None:
    array = xp.zeros((3, 4), np.int32)
    row = array[1]
    row += 5
    assert array.get().sum() == 20


def test_single_elements_convert_to_python_numbers() -> None:
    array = xp.asarray([41.5])
    assert float(array) == 41.5
    assert int(array) == 41
    assert bool(array)
    assert array.item() == 41.5
    with pytest.raises(ValueError, match="ambiguous"):
        bool(xp.zeros(2))


def test_implicit_conversion_to_numpy_is_refused() -> None:
    with pytest.raises(TypeError, match="Implicit conversion"):
        np.asarray(xp.zeros(2))
    with pytest.raises(TypeError):
        xp.zeros(2) + np.zeros(2)


def test_mismatched_shapes_and_casts_are_refused_at_the_call() -> None:
    with pytest.raises(ValueError, match=r"broadcast|shape"):
        xp.zeros(3) + xp.zeros(4)
    counts = xp.zeros(3, np.int32)
    with pytest.raises(TypeError):
        counts += 1.5
    with pytest.raises(ValueError, match=r"zero-size|identity"):
        xp.zeros(0).max()


def test_numpy_ufuncs_of_device_arrays_stay_on_the_device() -> None:
    result = np.add(xp.ones(3), 1)
    assert isinstance(result, xp.ndarray)
    assert result.tolist() == [2, 2, 2]


def test_memory_pool_reuses_what_arrays_give_back() -> None:
    pool = xp.get_default_memory_pool()
    before = pool.used_bytes()
    array = xp.zeros(1 << 20, np.uint8)
    ptr = array.data.ptr
    assert pool.used_bytes() == before + (1 << 20)
    del array
    assert pool.used_bytes() == before
    assert xp.empty(1 << 20, np.uint8).data.ptr == ptr
    pool.free_all_blocks()
    assert pool.free_bytes() == 0


def test_out_of_memory_names_what_was_asked_and_what_there_is() -> None:
    free, total = xp.cuda.Device().mem_info
    assert 0 < free <= total
    with pytest.raises(xp.cuda.memory.OutOfMemoryError) as caught:
        xp.empty(total * 2, np.uint8)
    assert f"{total * 2:,}" in str(caught.value)
    if XP != "cupy":
        assert f"{total:,}" in str(caught.value)


@needs_simulator
def test_structured_arrays_move_and_their_fields_are_views() -> None:
    record = np.dtype([("token", "<i4"), ("logprob", "<f4"), ("where", "<u8", (2,))])
    host = np.zeros(5, record)
    host["token"] = np.arange(5)
    array = xp.asarray(host)
    array["logprob"][...] = 0.5
    array["where"][2] = 7
    found = array.get()
    assert found["token"].tolist() == [0, 1, 2, 3, 4]
    assert found["logprob"].tolist() == [0.5] * 5
    assert found["where"][2].tolist() == [7, 7]


@needs_simulator
def test_names_that_are_not_provided_say_so() -> None:
    with pytest.raises(AttributeError, match=r"cupy\.fft"):
        _ = xp.fft


def test_an_array_over_unowned_memory_sees_the_owners_bytes() -> None:
    owner = xp.arange(8, dtype=np.int32)
    memory = xp.cuda.UnownedMemory(owner.data.ptr, owner.nbytes, owner)
    other = xp.ndarray((4,), np.int32, xp.cuda.MemoryPointer(memory, 16))
    assert other.tolist() == [4, 5, 6, 7]
