"""cupy.RawModule and RawKernel: kernels from source, built by the host compiler.

Backend 'python' is the simulator's counterpart of library kernels (cuBLAS and the like): the
module is a class `package.module:Class` of which the device process makes one instance
(`Class(*options)`), and a kernel is one of its methods. A launch calls the method with the
launch's arguments; device arrays arrive as NumPy views of device memory, everything else as it
is. In a graph the arguments are prepared once, at capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from emulation.cupysim import client as client_module
from emulation.cupysim.arguments import pack_arguments
from emulation.cupysim.cuda.compiler import CompileException
from emulation.cupysim.cuda.memory import MemoryPointer
from emulation.cupysim.cuda.stream import current_stream_ptr
from emulation.cupysim.kernel_source import build_kernels
from emulation.cupysim.kernels import Signature
from emulation.cupysim.ndarray import ndarray
from engine.native import CompileError, CompilerMissing

MAX_THREADS_PER_BLOCK = 1024
BACKENDS = ("nvrtc", "nvcc", "python")

Dims = Sequence[int]


def _dim3(name: str, dims: Dims) -> tuple[int, int, int]:
    full = (*(int(n) for n in dims), 1, 1)[:3]
    if len(dims) > 3 or min(full) < 1:
        raise ValueError(f"{name}={tuple(dims)}: one to three positive numbers are needed")
    return full[0], full[1], full[2]


class Function:
    """A kernel of a module: `kernel(grid, block, args, shared_mem=0)` enqueues a launch."""

    def __init__(self, function_id: int, name: str, signature: Signature | None) -> None:
        self.name = name
        self._id = function_id
        self._signature = signature  # None: a Python kernel
        self._client = client_module.current()

    def __call__(
        self, grid: Dims, block: Dims, args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        full_grid, full_block = _dim3("grid", grid), _dim3("block", block)
        stream = current_stream_ptr()
        if self._signature is None:
            prepared = tuple(_python_argument(value) for value in args)
            self._client.post("launch_python", stream, self._id, prepared)
            return
        self._check(self._signature, full_block, shared_mem)
        blob = pack_arguments(self.name, self._signature, args)
        self._client.post("launch", stream, self._id, full_grid, full_block, blob, len(args))

    def _check(self, signature: Signature, block: tuple[int, int, int], shared_mem: int) -> None:
        threads = block[0] * block[1] * block[2]
        if threads > MAX_THREADS_PER_BLOCK:
            raise ValueError(f"{self.name}: {threads} threads per block, at most 1024 are possible")
        if signature.barriers and threads > 1:
            raise ValueError(
                f"{self.name}: its module uses __syncthreads, and cupysim runs a block's threads "
                f"one after the other; launch it with one thread per block, not {threads}"
            )
        if shared_mem:
            raise ValueError(f"{self.name}: shared_mem={shared_mem}, but cupysim has none")


def _python_argument(value: Any) -> Any:
    if isinstance(value, ndarray):
        return value.address
    if isinstance(value, (list, tuple)):
        return type(value)(_python_argument(item) for item in value)
    return value.ptr if isinstance(value, MemoryPointer) else value


class RawModule:
    """Kernels of one source. `code`, or `path`: a source file, or with backend 'python' a class.
    `options` are the compiler's: -I, -D, -std, -O and such; what only nvcc knows is ignored."""

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | Path | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Sequence[str] | None = None,
        jitify: bool = False,
    ) -> None:
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        if backend not in BACKENDS:
            raise ValueError(f"backend={backend!r} is none of {', '.join(BACKENDS)}")
        if enable_cooperative_groups or name_expressions or translate_cucomplex or jitify:
            raise ValueError(
                "cupysim has no cooperative groups, name expressions, complex translation or "
                'jitify; write kernels as extern "C" functions'
            )
        if backend == "python" and path is None:
            raise TypeError("backend='python' needs path='package.module:Class'")
        self.code = code
        self.file_path = None if path is None else str(path)
        self.options = tuple(options)
        self.backend = backend
        self._module_id: int | None = None

    def compile(self, log_stream: Any = None) -> None:
        """Builds and loads now instead of at the first get_function."""
        self._load()

    def _load(self) -> int:
        if self._module_id is None:
            client = client_module.current()
            if self.backend == "python":
                found = client.request("load_python", self.file_path, self.options)
            else:
                found = client.request("load_native", str(self._build()))
            self._module_id = int(found)
        return self._module_id

    def _build(self) -> Path:
        folder, code = None, self.code
        if code is None:
            source = Path(str(self.file_path))
            folder, code = source.parent.absolute(), source.read_text()
        try:
            return build_kernels(code, self.options, folder=folder)
        except CompilerMissing:
            raise
        except CompileError as error:
            raise CompileException(str(error), code, self.file_path or "", self.options) from error

    def get_function(self, name: str) -> Function:
        module_id = self._load()
        function_id, signature = client_module.current().request("get_function", module_id, name)
        return Function(function_id, name, signature)


class RawKernel:
    """One kernel of a source, compiled at its first launch."""

    def __init__(
        self,
        code: str,
        name: str,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        **module_options: Any,
    ) -> None:
        self.name = name
        self._module = RawModule(code=code, options=options, backend=backend, **module_options)
        self._function: Function | None = None

    def compile(self, log_stream: Any = None) -> None:
        if self._function is None:
            self._function = self._module.get_function(self.name)

    def __call__(
        self, grid: Dims, block: Dims, args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        self.compile()
        assert self._function is not None
        self._function(grid, block, args, shared_mem=shared_mem)
