"""CUDA C++ sources into cubins, built once and cached by everything that can change them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engine.errors import UserError
from engine.native import cache_dir

FLAGS = ("-O3", "-std=c++17", "-lineinfo", "--expt-relaxed-constexpr", "-Werror", "all-warnings")
TIMEOUT_S = 300.0


class NvccError(UserError):
    """The CUDA compiler is missing, or refused a source; the message ends with its words."""


def build_cubin(
    source: Path, *, include_dirs: Sequence[Path], architecture: str, device_launch: bool = False
) -> Path:
    """Path of the cubin of `source` for `architecture` ("sm_90"), built now unless cached.

    device_launch: link the device runtime, which launching graphs from the device needs.
    """
    key = hashlib.sha256(repr((FLAGS, architecture, device_launch)).encode())
    files = [source] + [
        path
        for folder in include_dirs
        for path in sorted(folder.iterdir())
        if path.suffix in (".h", ".cuh")
    ]
    for path in files:
        key.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    folder = cache_dir() / "cubin"
    folder.mkdir(exist_ok=True)
    target = folder / f"{source.stem}-{architecture}-{key.hexdigest()[:24]}.cubin"
    if not target.exists():
        includes = [f"-I{path}" for path in include_dirs]
        _build(source, target, [f"-arch={architecture}", *includes], device_launch)
    return target


def _build(source: Path, target: Path, flags: list[str], device_launch: bool) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        if device_launch:
            unlinked = Path(scratch) / "unlinked.o"
            _nvcc([*FLAGS, *flags, "-rdc=true", "-dc", str(source), "-o", str(unlinked)])
            linking = [flags[0], "-dlink", "-cubin", str(unlinked), "-lcudadevrt"]
            _nvcc([*linking, "-o", str(built)])
        else:
            _nvcc([*FLAGS, *flags, "-cubin", str(source), "-o", str(built)])
        built.replace(target)  # atomic: who builds the same at once only repeats the work


def _nvcc(arguments: list[str]) -> None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    program = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if program is None:
        raise NvccError(
            "nvcc was not found in PATH or in CUDA_HOME/bin; install the CUDA toolkit, or set "
            "CUDA_HOME to where it is"
        )
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise NvccError(f"nvcc failed: {(done.stderr or done.stdout).strip()}")
