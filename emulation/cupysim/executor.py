"""ctypes binding of csrc/executor_api.cpp: what the device process runs its streams with."""

from __future__ import annotations

import ctypes
import threading
import traceback
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint, c_uint64, c_void_p
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from engine.native import build_library

CSRC = Path(__file__).parent / "csrc"
ERROR_BYTES = 8192

_PYTHON_CALL = ctypes.CFUNCTYPE(c_int, c_uint64)
_PYTHON_RELEASE = ctypes.CFUNCTYPE(None, c_uint64)

_Signature = tuple[Any, list[Any]]
_SIGNATURES: dict[str, _Signature] = {
    "init": (None, [_PYTHON_CALL, _PYTHON_RELEASE]),
    "runtime": (c_void_p, []),
    "stream_create": (c_void_p, []),
    "set_forget_stream": (None, [c_void_p]),
    "stream_run": (None, [c_void_p]),
    "stream_close": (None, [c_void_p]),
    "stream_pushed": (c_uint64, [c_void_p]),
    "stream_completed": (c_uint64, [c_void_p]),
    "stream_push": (c_uint64, [c_void_p, c_void_p]),
    "op_kernel": (
        c_void_p,
        [c_void_p, c_char_p, POINTER(c_uint), POINTER(c_uint), c_char_p, c_size_t, c_uint],
    ),
    "op_copy": (c_void_p, [c_void_p, c_void_p, c_size_t]),
    "op_fill": (c_void_p, [c_void_p, c_int, c_size_t]),
    "op_data": (c_void_p, [c_void_p, c_char_p, c_size_t]),
    "op_python": (c_void_p, [c_uint64, c_char_p]),
    "op_record": (c_void_p, [c_void_p]),
    "op_wait_event": (c_void_p, [c_void_p]),
    "op_wait_stream": (c_void_p, [c_void_p]),
    "op_notify": (c_void_p, [c_int, c_uint64]),
    "op_graph": (c_void_p, [c_uint64]),
    "event_create": (c_void_p, []),
    "event_destroy": (None, [c_void_p]),
    "event_done": (c_int, [c_void_p]),
    "event_time_ns": (c_int64, [c_void_p]),
    "graph_create": (c_void_p, []),
    "graph_discard": (None, [c_void_p]),
    "graph_append": (None, [c_void_p, c_void_p]),
    "graph_instantiate": (c_uint64, [c_void_p]),
    "graph_destroy": (c_int, [c_uint64]),
    "counters": (None, [POINTER(c_uint64)]),
    "error": (c_size_t, [c_char_p, c_size_t]),
    "fail": (None, [c_char_p]),
    "wait_fatal": (None, []),
    "streams_wait": (c_int, [POINTER(c_void_p), c_size_t, c_int]),
    "event_wait": (None, [c_void_p]),
    "describe": (None, [c_char_p]),
}

Dim3 = tuple[int, int, int]


class Executor:
    """The one executor of a device process. Operations and handles are native addresses."""

    def __init__(self) -> None:
        library = build_library(
            [CSRC / "executor.cpp", CSRC / "executor_api.cpp"],
            extra_flags=["-fvisibility=hidden"],
            name="cupysim-executor",
        )
        self._library = ctypes.CDLL(str(library))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, f"cupysim_{name}")
            function.restype = result
            function.argtypes = arguments
            setattr(self, name, function)
        self._calls: dict[int, Callable[[], None]] = {}
        self._call_ids = count(1)
        self._call_back = _PYTHON_CALL(self._call)  # kept: the library holds their addresses
        self._release_back = _PYTHON_RELEASE(self._release)
        self._library.cupysim_init(self._call_back, self._release_back)

    def __getattr__(self, name: str) -> Any:  # the functions set above, for the type checker
        raise AttributeError(name)

    def _call(self, call_id: int) -> int:
        try:
            with np.errstate(all="ignore"):  # as on a GPU: infinities and NaNs, no warnings
                self._calls[call_id]()
        except BaseException as error:
            traceback.print_exc()
            self.describe(f"{type(error).__name__}: {error}".encode())
            return 1
        return 0

    def _release(self, call_id: int) -> None:
        self._calls.pop(call_id, None)

    def start_stream(self) -> int:
        """A new stream with its worker. The worker is a Python thread, so that Python-backed
        operations find the same interpreter thread state each time; it waits without the GIL."""
        stream: int = self.stream_create()
        threading.Thread(
            target=self.stream_run, args=(stream,), name="cupysim-stream", daemon=True
        ).start()
        return stream

    def kernel(self, run: int, name: str, grid: Dim3, block: Dim3, blob: bytes, count: int) -> int:
        dims = c_uint * 3
        operation: int = self.op_kernel(
            run, name.encode(), dims(*grid), dims(*block), blob, len(blob), count
        )
        return operation

    def python(self, call: Callable[[], None], name: str) -> int:
        call_id = next(self._call_ids)
        self._calls[call_id] = call
        operation: int = self.op_python(call_id, name.encode())
        return operation

    def error_text(self) -> str:
        """The sticky error, or an empty text."""
        text = ctypes.create_string_buffer(ERROR_BYTES)
        self.error(text, ERROR_BYTES)
        return text.value.decode(errors="replace")

    def wait(self, streams: list[int], limit_ms: int = -1) -> bool:
        """Until what is in the streams now has run; False after `limit_ms`."""
        return bool(self.streams_wait((c_void_p * len(streams))(*streams), len(streams), limit_ms))

    def graph_counters(self) -> tuple[int, int]:
        """(graph runs, launches made from the device) since the start."""
        out = (c_uint64 * 2)()
        self.counters(out)
        return int(out[0]), int(out[1])
