"""Compiles C++ sources into cached shared libraries with the host's own compiler.

A library is looked up by everything that can change it: the preprocessed sources (so every
included file counts), the flags, the compiler's version and the processor (`-march=native`).
A finished library is put in place by an atomic rename, so any number of processes may build the
same one at once. The cache is `$BLINKBED_CACHE`, else `$XDG_CACHE_HOME/blinkbed`, else
`~/.cache/blinkbed`; it may be deleted at any time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.config import Environment
from engine.errors import UserError

FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Werror",
)
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300.0

Define = str | int | None


class CompileError(UserError, RuntimeError):
    """The compiler refused a source; the message ends with the compiler's own output."""


class CompilerMissing(CompileError):  # noqa: N818 - reads as the fact it states
    """No C++ compiler was found on this machine."""


def cache_dir() -> Path:
    """Folder of everything Blinkbed may build or fetch again; made if it is not there."""
    folder = Environment.read().cache_dir
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def find_compiler() -> list[str]:
    """The compiler's command line: `$CXX` where set, else the first known compiler in PATH."""
    configured = os.environ.get("CXX")
    candidates = [shlex.split(configured)] if configured else [[name] for name in COMPILERS]
    for candidate in candidates:
        program = shutil.which(candidate[0]) if candidate else None
        if program:
            return [program, *candidate[1:]]
    looked_for = configured or ", ".join(COMPILERS)
    raise CompilerMissing(
        f"no C++ compiler found (looked for {looked_for} in PATH); install one, for example "
        "with 'apt-get install g++', or set CXX to the compiler's path"
    )


@functools.lru_cache(maxsize=8)
def _compiler_version(compiler: tuple[str, ...]) -> str:
    return _run([*compiler, "--version"], what="the C++ compiler's version")


@functools.lru_cache(maxsize=1)
def _processor() -> str:
    """What `-march=native` depends on: the first processor's model and feature lines."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return " ".join(os.uname())
    first = text.split("\n\n", 1)[0]
    wanted = ("vendor_id", "model", "cpu family", "flags", "Features", "CPU part")
    return "\n".join(line for line in first.splitlines() if line.startswith(wanted))


def _run(command: Sequence[str], *, what: str) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"compiling {what} took longer than {TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise CompilerMissing(f"the C++ compiler {command[0]} cannot be run: {error}") from error
    if done.returncode != 0:
        raise CompileError(
            f"compiling {what} failed with exit status {done.returncode}:\n"
            f"{done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def _definition(name: str, value: Define) -> str:
    return f"-D{name}" if value is None else f"-D{name}={value}"


def _front_flags(
    include_dirs: Sequence[Path], defines: Mapping[str, Define], extra_flags: Sequence[str]
) -> list[str]:
    flags = [f"-I{directory}" for directory in include_dirs]
    flags += [_definition(name, value) for name, value in sorted(defines.items())]
    return flags + list(extra_flags)


def preprocess(
    source: Path,
    *,
    include_dirs: Sequence[Path] = (),
    defines: Mapping[str, Define] | None = None,
    extra_flags: Sequence[str] = (),
) -> str:
    """The source with every include and macro expanded, as the compiler sees it.

    Raises CompileError when an include is missing, CompilerMissing without a compiler.
    """
    front = _front_flags(include_dirs, defines or {}, extra_flags)
    compile_flags = [flag for flag in FLAGS if flag != "-shared"]
    command = [*find_compiler(), *compile_flags, *front, "-E", "-P", "-x", "c++", str(source)]
    return _run(command, what=str(source))


def build_library(
    sources: Sequence[Path],
    *,
    include_dirs: Sequence[Path] = (),
    defines: Mapping[str, Define] | None = None,
    extra_flags: Sequence[str] = (),
    name: str,
) -> Path:
    """Path of the shared library made of `sources`, built now unless the cache has it.

    `name` is the readable part of the file's name. `extra_flags` come last, so they may override
    the standard flags (`-std=c++20`, `-O0`); libraries to link (`-lfoo`) belong there too.
    Raises CompileError with the compiler's output, CompilerMissing without a compiler.
    """
    compiler = find_compiler()
    front = _front_flags(include_dirs, defines or {}, extra_flags)
    key = hashlib.sha256()
    for part in (*compiler, _compiler_version(tuple(compiler)), _processor(), *FLAGS, *front):
        key.update(part.encode() + b"\0")
    for source in sources:
        expanded = preprocess(
            source, include_dirs=include_dirs, defines=defines, extra_flags=extra_flags
        )
        key.update(expanded.encode() + b"\0")
    folder = cache_dir() / "lib"
    folder.mkdir(exist_ok=True)
    library = folder / f"{name}-{key.hexdigest()[:24]}.so"
    if not library.exists():
        inputs = [str(source) for source in sources]
        _build([*compiler, *FLAGS, "-x", "c++", *inputs, "-x", "none", *front], library, name)
    return library


def _build(command: Sequence[str], library: Path, name: str) -> None:
    handle, partial = tempfile.mkstemp(dir=library.parent, prefix=f".{name}-", suffix=".so")
    os.close(handle)
    try:
        _run([*command, "-o", partial], what=name)
        Path(partial).chmod(0o755)
        Path(partial).replace(library)  # atomic: a concurrent builder of the same key only repeats
    finally:
        Path(partial).unlink(missing_ok=True)
