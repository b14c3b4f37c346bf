"""Builds CUDA C++ source with the host compiler into a library that the device process loads."""

from __future__ import annotations

import hashlib
import logging
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.native import build_library, cache_dir, preprocess

CSRC = Path(__file__).parent / "csrc"

log = logging.getLogger(__name__)

_SHIM_FLAGS = ["-include", str(CSRC / "cuda_shim.h"), "-fvisibility=hidden"]
_PASSED_ON = ("-I", "-D", "-U", "-O", "-W", "-f", "-m", "-std", "-g", "-include")
_NVCC_NAMES = {"--std": "-std", "--include-path": "-I", "--define-macro": "-D"}
_NVCC_ONLY = ("-fmad", "-ftz", "-restrict", "-rdc", "-arch", "-maxrregcount", "-use_fast_math")
_TAKES_VALUE = ("-I", "-D", "-U", "-include", "-arch", "-Xptxas", "-Xcompiler", "-gencode")

# In the scanning pass the shim leaves a marker where a kernel starts. A kernel template, and a
# declaration without a body, have no entry of their own.
_MARKER = re.compile(r"(?P<before>[>}]?)\s*__cupysim_global__(?P<rest>[^;{}]*?)(?P<end>[;{])")
_NAME = re.compile(r"\bvoid\s+(\w+)\s*\(")


def compiler_options(options: Sequence[str]) -> list[str]:
    """What the host compiler gets of a module's options; the rest only matters to nvcc."""
    passed: list[str] = []
    remaining = list(options)
    while remaining:
        option = remaining.pop(0)
        name, equals, value = option.partition("=")
        name = _NVCC_NAMES.get(name, name)
        separate = name in _TAKES_VALUE and not equals and remaining
        if separate:
            value = remaining.pop(0)
        known = name.startswith(_PASSED_ON) and not name.startswith(_NVCC_ONLY)
        if not known:
            log.debug("option %s is for nvcc; the host compiler has no use for it", option)
        elif name in ("-I", "-D") and value:
            passed.append(name + value)
        elif separate:
            passed += [name, value]
        else:
            passed.append(f"{name}={value}" if equals else option)
    return passed


def kernel_names(expanded: str) -> list[str]:
    """Names of the kernels that are defined in a source after the scanning pass."""
    names: dict[str, None] = {}
    for match in _MARKER.finditer(expanded):
        found = _NAME.search(match["rest"])
        if match["end"] == "{" and match["before"] != ">" and found:
            names[found[1]] = None
    return list(names)


def build_kernels(code: str, options: Sequence[str], *, folder: Path | None = None) -> Path:
    """The library of all `extern "C" __global__` functions of `code`. `folder`: where a source
    file's own includes are looked for first. Raises CompileError, CompilerMissing."""
    flags = _SHIM_FLAGS + compiler_options(options)
    include_dirs = [folder] if folder is not None else []
    key = hashlib.sha256(code.encode()).hexdigest()[:16]
    source = _write_once(f"module-{key}.cu", code)
    expanded = preprocess(
        source, include_dirs=include_dirs, defines={"CUPYSIM_SCAN": None}, extra_flags=flags
    )
    names = kernel_names(expanded)
    entries = "".join(f"CUPYSIM_KERNEL({name})\n" for name in names)
    wrapper = f'#include "{source.name}"\nCUPYSIM_MODULE()\n{entries}'
    wrapper_key = hashlib.sha256(wrapper.encode()).hexdigest()[:16]
    wrapper_source = _write_once(f"entries-{wrapper_key}.cpp", wrapper)
    return build_library(
        [wrapper_source], include_dirs=include_dirs, extra_flags=flags, name=f"kernels-{key[:8]}"
    )


def _write_once(name: str, text: str) -> Path:
    """A file whose name stands for its contents; safe against concurrent writers."""
    folder = cache_dir() / "src"
    folder.mkdir(exist_ok=True)
    path = folder / name
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
            file.write(text)
        Path(file.name).replace(path)
    return path
