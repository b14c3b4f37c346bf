"""What a device process does for its clients: one method `do_*` per request of the wire.

Most requests only enqueue an operation on a stream. They are handled in the order in which a
client sends them.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, NoReturn

from emulation.cupysim import errors, wire
from emulation.cupysim.arena import Arena
from emulation.cupysim.array_ops import MAKERS, resolve
from emulation.cupysim.errors import CUDARuntimeError
from emulation.cupysim.executor import Dim3, Executor
from emulation.cupysim.kernels import (
    NativeKernel,
    NativeModule,
    PythonKernel,
    PythonModule,
    Signature,
)
from emulation.cupysim.region import Region, RegionTable, memfd
from emulation.cupysim.streams import Streams

DEFERRED = frozenset({"sync", "event_sync", "device_sync"})  # reply by themselves, later


class WithFds(tuple[Any, Sequence[int]]):
    """A result that travels with file descriptors."""

    __slots__ = ()

    def __new__(cls, result: Any, fds: Sequence[int]) -> WithFds:
        return super().__new__(cls, (result, fds))


class Requests:
    """Owns the device: memory, streams, kernels."""

    def __init__(
        self, executor: Executor, memory_bytes: int, end: Callable[[int], NoReturn]
    ) -> None:
        self._executor = executor
        self._end = end
        self._arena = Arena(memory_bytes)
        self._regions = RegionTable()
        self._regions.add(self._arena.region)
        self._windows: dict[int, Region] = {}
        self._streams = Streams(executor)
        self._modules: dict[int, NativeModule | PythonModule] = {}
        self._functions: dict[int, NativeKernel | PythonKernel] = {}
        self._ids = count(1)
        self._lock = threading.RLock()

    def post(self, name: str, arguments: tuple[Any, ...]) -> None:
        """A request without a reply: what goes wrong is the device's sticky error."""
        with self._lock:
            getattr(self, f"do_{name}")(*arguments)

    def answer(self, name: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self, f"do_{name}")(*arguments)

    def native_streams(self) -> list[int]:
        return self._streams.natives()

    # ---- memory ---------------------------------------------------------------------------

    def do_hello(self, version: int) -> Any:
        if version != wire.VERSION:
            raise RuntimeError(
                f"the device process speaks version {wire.VERSION}, the client {version}: "
                "they come from different builds"
            )
        with self._lock:
            regions = [(r.base, r.nbytes, r.offset) for r in self._regions]
            fds = [region.fd for region in self._regions]
        return WithFds((os.getpid(), self._executor.error_text(), regions), fds)

    def do_alloc(self, nbytes: int) -> int:
        self._check()
        return self._arena.allocate(nbytes)

    def do_free(self, stream: int, ptr: int) -> None:
        call = self._executor.python(lambda: self._arena.free(ptr), "free")
        self._streams.push(stream if stream in self._streams else 0, call)

    def do_mem_info(self) -> tuple[int, int]:
        return self._arena.free_bytes, self._arena.total

    def do_copy(self, stream: int, target: int, source: int, nbytes: int) -> None:
        self._require(target, nbytes)
        self._require(source, nbytes)
        self._streams.enqueue(stream, self._executor.op_copy(target, source, nbytes))

    def do_fill(self, stream: int, target: int, value: int, nbytes: int) -> None:
        self._require(target, nbytes)
        self._streams.enqueue(stream, self._executor.op_fill(target, value, nbytes))

    def do_data(self, stream: int, target: int, data: bytes) -> None:
        self._require(target, len(data))
        self._streams.enqueue(stream, self._executor.op_data(target, data, len(data)))

    def _require(self, ptr: int, nbytes: int) -> None:
        region = self._regions.find(ptr)
        if ptr + nbytes > region.base + region.nbytes:
            raise ValueError(f"{nbytes} bytes at {ptr:#x} leave device memory")

    def do_window_create(self, nbytes: int, path: str | None, offset: int) -> Any:
        fd = memfd("cupysim-window", nbytes) if path is None else os.open(path, os.O_RDWR)
        region = Region(fd, nbytes, offset=offset)
        with self._lock:
            self._regions.add(region)
            self._windows[region.base] = region
        return WithFds(region.base, [fd])

    def do_window_close(self, base: int) -> None:
        """The mapping itself stays: an operation in flight may still use it."""
        region = self._windows.pop(base, None)
        if region is not None:
            self._regions.remove(region)
            os.close(region.fd)

    # ---- kernels and array operations -----------------------------------------------------

    def do_load_native(self, path: str) -> int:
        return self._add_module(NativeModule(path, self._executor.runtime()))

    def do_load_python(self, path: str, options: tuple[str, ...]) -> int:
        return self._add_module(PythonModule(path, options))

    def _add_module(self, module: NativeModule | PythonModule) -> int:
        with self._lock:
            module_id = next(self._ids)
            self._modules[module_id] = module
        return module_id

    def do_get_function(self, module_id: int, name: str) -> tuple[int, Signature | None]:
        function = self._modules[module_id].function(name)
        with self._lock:
            function_id = next(self._ids)
            self._functions[function_id] = function
        return function_id, function.signature if isinstance(function, NativeKernel) else None

    def do_launch(
        self, stream: int, function_id: int, grid: Dim3, block: Dim3, blob: bytes, num_args: int
    ) -> None:
        kernel = self._functions[function_id]
        assert isinstance(kernel, NativeKernel)
        operation = self._executor.kernel(kernel.run, kernel.name, grid, block, blob, num_args)
        self._streams.enqueue(stream, operation)

    def do_launch_python(self, stream: int, function_id: int, arguments: tuple[Any, ...]) -> None:
        kernel = self._functions[function_id]
        assert isinstance(kernel, PythonKernel)
        call, prepared = kernel.call, resolve(arguments, self._regions)

        def run() -> None:
            call(*prepared)

        self._streams.enqueue(stream, self._executor.python(run, kernel.name))

    def do_array(self, stream: int, maker: str, arguments: tuple[Any, ...]) -> None:
        call = MAKERS[maker](*resolve(arguments, self._regions))
        self._streams.enqueue(stream, self._executor.python(call, f"array operation {maker}"))

    # ---- streams, events, graphs ----------------------------------------------------------

    def do_stream_create(self, non_blocking: bool) -> int:
        with self._lock:
            return self._streams.create(non_blocking)

    def do_stream_destroy(self, stream: int) -> None:
        self._streams.destroy(stream)

    def do_stream_done(self, stream: int) -> bool:
        with self._lock:
            done = self._streams.idle(stream)
        self._check()
        return done

    def do_event_create(self) -> int:
        with self._lock:
            return self._streams.create_event()

    def do_event_destroy(self, event: int) -> None:
        self._streams.destroy_event(event)

    def do_event_done(self, event: int) -> bool:
        with self._lock:
            return self._streams.event_done(event)

    def do_event_record(self, event: int, stream: int) -> None:
        with self._lock:
            self._streams.record(event, stream)

    def do_event_wait(self, event: int, stream: int) -> None:
        with self._lock:
            self._streams.wait_event(event, stream)

    def do_elapsed(self, start: int, end: int) -> float:
        with self._lock:
            return self._streams.elapsed_ms(start, end)

    def do_begin_capture(self, stream: int) -> None:
        self._check()
        with self._lock:
            self._streams.begin_capture(stream)

    def do_end_capture(self, stream: int) -> int:
        with self._lock:
            return self._streams.end_capture(stream)

    def do_is_capturing(self, stream: int) -> bool:
        with self._lock:
            return self._streams.is_capturing(stream)

    def do_graph_launch(self, stream: int, handle: int) -> None:
        operation = self._executor.op_graph(handle)
        if not operation:
            raise CUDARuntimeError(errors.INVALID_HANDLE, f"no graph {handle:#x}")
        self._streams.enqueue(stream, operation)

    def do_graph_destroy(self, handle: int) -> None:
        self._executor.graph_destroy(handle)

    # ---- waiting: the reply is sent when the work is done ----------------------------------

    def do_sync(self, connection: socket.socket, request_id: int, stream: int) -> None:
        with self._lock:
            self._streams.refuse_in_capture(stream, "synchronize")
            notify = self._executor.op_notify(connection.fileno(), request_id)
            self._streams.push(stream, notify)

    def do_event_sync(self, connection: socket.socket, request_id: int, event: int) -> None:
        native = self._streams.event(event).native
        self._reply_after(connection, request_id, lambda: self._executor.event_wait(native))

    def do_device_sync(self, connection: socket.socket, request_id: int) -> None:
        natives = self._streams.natives()
        self._reply_after(connection, request_id, lambda: self._executor.wait(natives))

    def _reply_after(
        self, connection: socket.socket, request_id: int, wait: Callable[[], object]
    ) -> None:
        own = connection.dup()

        def work() -> None:
            with own:
                wait()
                text = self._executor.error_text()
                status = wire.DEVICE_ERROR if text else wire.DONE
                try:
                    own.sendall(wire.REPLY.pack(request_id, status) + text.encode())
                except OSError:
                    pass  # the client is gone

        threading.Thread(target=work, daemon=True).start()

    # ---- control --------------------------------------------------------------------------

    def _check(self) -> None:
        text = self._executor.error_text()
        if text:
            raise CUDARuntimeError(errors.LAUNCH_FAILURE, text)

    def do_check(self) -> None:
        self._check()

    def do_counters(self) -> tuple[int, int]:
        return self._executor.graph_counters()

    def do_shutdown(self) -> None:
        self._end(0)
