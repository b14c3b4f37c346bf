"""Kernels from source on the simulated GPU: building, caching, launching, refusing."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emulation.cupysim as cp
from emulation.cupysim.cuda.compiler import CompileException
from emulation.cupysim.kernel_source import compiler_options, kernel_names
from engine import native

AXPY = r"""
extern "C" __global__ void axpy(const float* x, float* y, float a, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += a * x[i];
}
"""

BASICS = r"""
struct Pair { int first; float second; };

extern "C" {
__global__ void launch_shape(unsigned* out) {
  const unsigned thread =
      threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  out[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1 + thread + 1000 * block;
}
__global__ void __launch_bounds__(128) scalars(
    double* out, bool flag, signed char small, unsigned long long large, double real, Pair pair) {
  out[0] = flag; out[1] = small; out[2] = static_cast<double>(large); out[3] = real;
  out[4] = pair.first + pair.second;
}
__global__ void nothing() {}
}

extern "C" __global__ void atomics(int* counter, unsigned long long* word, float* sum, int* seen) {
  seen[atomicAdd(counter, 1)] += 1;
  atomicCAS(word, 0ull, 42ull);
  atomicExch(word + 1, 5ull);
  atomicAdd(sum, 0.5f);
  atomicMax(counter + 1, static_cast<int>(threadIdx.x));
  __threadfence_system();
}

extern "C" __global__ void null_is_null(const int* nothing, int* out) { *out = nothing == nullptr; }

template <class T>
__global__ void not_an_entry(T* out) { *out = T(); }
"""


def module(code: str = BASICS, **options: Any) -> cp.RawModule:
    return cp.RawModule(code=code, **options)


def test_a_raw_kernel_computes_over_blocks_and_threads() -> None:
    x = cp.arange(100, dtype=np.float32)
    y = cp.ones(100, np.float32)
    kernel = cp.RawKernel(AXPY, "axpy")
    kernel((4,), (32,), (x, y, np.float32(2), np.int32(100)))
    np.testing.assert_array_equal(y.get(), 2 * np.arange(100) + 1)


def test_every_block_and_thread_of_three_dimensions_runs_once() -> None:
    out = cp.zeros(2 * 3 * 4 * 5 * 6, np.uint32)
    module().get_function("launch_shape")((2, 3, 4), (5, 6, 1), (out,))
    block, thread = np.divmod(np.arange(out.size), 30)
    np.testing.assert_array_equal(out.get(), 1 + thread + 1000 * block)


def test_scalars_arrive_by_cupys_rules() -> None:
    out = cp.zeros(5)
    pair = np.array((3, 0.5), dtype=[("first", "<i4"), ("second", "<f4")])[()]
    kernel = module().get_function("scalars")
    kernel((1,), (1,), (out, True, np.int8(-3), 2**63, 2.5, pair))
    assert out.tolist() == [1, -3, 2.0**63, 2.5, 3.5]
    kernel((1,), (1,), (out, np.bool_(False), np.int8(1), np.uint64(7), np.float64(1), pair))
    assert out.tolist() == [0, 1, 7, 1, 3.5]


def test_none_passes_a_null_pointer_and_an_address_passes_itself() -> None:
    out = cp.zeros(1, np.int32)
    kernel = module().get_function("null_is_null")
    kernel((1,), (1,), (None, out))
    assert int(out) == 1
    kernel((1,), (1,), (out.data.ptr, out.data))
    assert int(out) == 0


def test_atomics_do_what_cuda_says() -> None:
    counter, word = cp.zeros(2, np.int32), cp.zeros(2, np.uint64)
    total, seen = cp.zeros(1, np.float32), cp.zeros(64, np.int32)
    module().get_function("atomics")((2,), (32,), (counter, word, total, seen))
    assert counter.tolist() == [64, 31]
    assert word.tolist() == [42, 5]
    assert float(total) == 32
    assert seen.tolist() == [1] * 64


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "takes 4 arguments, 0 were given"),
        ((None, None, np.float32(1), np.int32(1), 5), "takes 4 arguments, 5 were given"),
        ((None, None, 1.0, np.int32(1)), "argument 2.*4 bytes.*8 bytes"),
        ((None, None, np.float32(1), 1), "argument 3.*an integer of 4 bytes"),
        ((None, None, np.int32(1), np.int32(1)), "argument 2.*floating-point"),
        ((2.0, None, np.float32(1), np.int32(1)), "argument 0.*a pointer"),
        (("x", None, np.float32(1), np.int32(1)), "Unsupported type"),
        ((np.zeros(3), None, np.float32(1), np.int32(1)), "Unsupported type"),
    ],
)
def test_wrong_arguments_are_refused_at_the_call(args: tuple[Any, ...], message: str) -> None:
    kernel = cp.RawKernel(AXPY, "axpy")
    with pytest.raises(TypeError, match=message):
        kernel((1,), (1,), args)


def test_a_kernel_without_parameters_launches() -> None:
    kernel = module().get_function("nothing")
    kernel((1,), (1,), ())
    cp.cuda.Stream.null.synchronize()


def test_impossible_launches_are_refused_at_the_call() -> None:
    kernel = module().get_function("nothing")
    with pytest.raises(ValueError, match="2048 threads per block"):
        kernel((1,), (2048,), ())
    with pytest.raises(ValueError, match="shared_mem"):
        kernel((1,), (1,), (), shared_mem=64)
    with pytest.raises(ValueError, match="grid"):
        kernel((0,), (1,), ())


def test_an_unknown_kernel_is_named() -> None:
    with pytest.raises(LookupError, match="no kernel named missing"):
        module().get_function("missing")
    with pytest.raises(LookupError, match="not_an_entry"):
        module().get_function("not_an_entry")


def test_shared_memory_is_a_compile_error_that_says_why() -> None:
    code = 'extern "C" __global__ void k(int* o) { __shared__ int s[4]; s[0] = 1; *o = s[0]; }'
    with pytest.raises(CompileException, match="__shared__ memory is not supported by cupysim"):
        module(code).get_function("k")


def test_warnings_are_errors_and_carry_the_compilers_words() -> None:
    code = 'extern "C" __global__ void k(int* o) { int unused; *o = 1; }'
    with pytest.raises(CompileException, match="unused"):
        module(code).get_function("k")


def test_a_barrier_is_refused_for_more_than_one_thread_per_block() -> None:
    code = 'extern "C" __global__ void k(int* o) { *o += 1; __syncthreads(); *o += 1; }'
    kernel = module(code).get_function("k")
    out = cp.zeros(1, np.int32)
    with pytest.raises(ValueError, match="__syncthreads"):
        kernel((1,), (2,), (out,))
    kernel((3,), (1,), (out,))
    assert int(out) == 6


def test_options_reach_the_host_compiler(tmp_path: Path) -> None:
    (tmp_path / "value.h").write_text("#define FROM_HEADER 40\n")
    code = (
        '#include "value.h"\n'
        'extern "C" __global__ void k(long* o) { o[0] = FROM_HEADER + MORE; o[1] = __cplusplus; }'
    )
    options = (f"-I{tmp_path}", "-DMORE=2", "--std=c++20", "-arch=sm_90", "--use_fast_math")
    out = cp.zeros(2, np.int64)
    module(code, options=options).get_function("k")((1,), (1,), (out,))
    assert out.tolist() == [42, 202002]


def test_options_that_only_nvcc_knows_are_dropped() -> None:
    given = ["-I", "a", "--define-macro=X=1", "-Xptxas", "-v", "-rdc=true", "-fmad=false", "-O2"]
    assert compiler_options(given) == ["-Ia", "-DX=1", "-O2"]


def test_a_changed_include_builds_anew_and_an_unchanged_one_does_not(tmp_path: Path) -> None:
    code = '#include "v.h"\nextern "C" __global__ void k(int* o) { *o = V; }'
    header, out = tmp_path / "v.h", cp.zeros(1, np.int32)
    found = []
    for value in (1, 2, 1):
        header.write_text(f"#define V {value}\n")
        module(code, options=(f"-I{tmp_path}",)).get_function("k")((1,), (1,), (out,))
        found.append(int(out))
    assert found == [1, 2, 1]


def test_a_source_file_finds_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "near.h").write_text("static const int near_value = 11;\n")
    source = tmp_path / "k.cu"
    source.write_text(
        '#include "near.h"\nextern "C" __global__ void k(int* o) { *o = near_value; }'
    )
    out = cp.zeros(1, np.int32)
    cp.RawModule(path=str(source)).get_function("k")((1,), (1,), (out,))
    assert int(out) == 11


def test_kernels_are_found_in_expanded_source() -> None:
    expanded = (
        'extern "C" __cupysim_global__ void first(int a) { } '
        'extern "C" { __cupysim_global__ void second(); __cupysim_global__ void second() { } } '
        "template <class T> __cupysim_global__ void third(T v) { }"
    )
    assert kernel_names(expanded) == ["first", "second"]


# ---- the compile cache ----------------------------------------------------------------------


def _build(folder: str) -> str:
    return str(native.build_library([Path(folder) / "unit.cpp"], name="unit"))


def test_the_cache_builds_once_and_survives_concurrent_builders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLINKBED_CACHE", str(tmp_path / "cache"))
    (tmp_path / "unit.cpp").write_text('extern "C" int unit() { return 1; }\n')
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        paths = pool.map(_build, [str(tmp_path)] * 4)
    assert len(set(paths)) == 1
    built = Path(paths[0]).stat().st_mtime_ns
    assert _build(str(tmp_path)) == paths[0]
    assert Path(paths[0]).stat().st_mtime_ns == built
    assert [path.name for path in (tmp_path / "cache" / "lib").iterdir()] == [Path(paths[0]).name]


def test_flags_and_defines_make_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLINKBED_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "unit.cpp"
    source.write_text('extern "C" int unit() { return VALUE; }\n')
    one = native.build_library([source], defines={"VALUE": 1}, name="unit")
    two = native.build_library([source], defines={"VALUE": 2}, name="unit")
    slow = native.build_library([source], defines={"VALUE": 2}, extra_flags=["-O0"], name="unit")
    assert len({one, two, slow}) == 3


def test_a_missing_compiler_is_one_clear_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(native.CompilerMissing, match=r"no C\+\+ compiler found.*apt-get install"):
        native.build_library([tmp_path / "unit.cpp"], name="unit")
    with pytest.raises(native.CompilerMissing):
        module('extern "C" __global__ void never_built() {}').get_function("never_built")


def test_a_device_without_a_compiler_ends_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "emulation.cupysim.device", "--socket", str(tmp_path / "s")]
    environment = {"PATH": "", "BLINKBED_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.startswith("cupysim device: no C++ compiler found")
    assert len(done.stderr.splitlines()) == 1


# ---- Python-backed kernels ------------------------------------------------------------------


class Program:
    """What the device process imports for backend 'python'."""

    def __init__(self, offset: str = "0") -> None:
        self._offset = int(offset)
        self.num_calls = 0

    def forward(self, x: Any, out: Any, scale: float) -> None:
        assert isinstance(x, np.ndarray)
        self.num_calls += 1
        out["value"] = x.sum(axis=1) * scale + self._offset
        out["call"] = self.num_calls


def test_a_python_kernel_gets_views_of_device_memory() -> None:
    path = f"{__name__}:Program"
    forward = cp.RawModule(path=path, options=("5",), backend="python").get_function("forward")
    x = cp.arange(12, dtype=np.float32).reshape(3, 4)
    out = cp.zeros(3, np.dtype([("value", "<f8"), ("call", "<i4")]))
    forward((1,), (1,), (x, out, 2.0))
    forward((1,), (1,), (x.T[:3], out, np.float32(1)))
    found = out.get()
    assert found["value"].tolist() == [12 + 5, 15 + 5, 18 + 5]
    assert found["call"].tolist() == [2, 2, 2]


def test_a_python_module_that_is_wrong_says_how() -> None:
    def load(path: str, method: str = "forward") -> None:
        cp.RawModule(path=path, backend="python").get_function(method)

    with pytest.raises(ValueError, match=r"package\.module:Class"):
        load(__name__)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load("no_such_module:Program")
    with pytest.raises(LookupError, match="no method named backward"):
        load(f"{__name__}:Program", "backward")
