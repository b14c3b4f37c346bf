"""The scheduler on a real GPU, one block of 256 threads, against the twin."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.ring_library import CSRC

HERE = Path(__file__).parent


def gpu_architecture() -> str:
    """sm_NN of the first GPU; skips without one, or without nvcc."""
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not in PATH")
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no CUDA GPU: nvidia-smi is not in PATH")
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        pytest.skip(f"no CUDA GPU: {(done.stdout + done.stderr).strip()}")
    return "sm_" + done.stdout.split()[0].replace(".", "")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cuda") / "scheduler.so"
    flags = ["-std=c++17", "-O2", f"-arch={gpu_architecture()}", "-shared", "-Xcompiler", "-fPIC"]
    source = str(HERE / "csrc" / "scheduler_gpu.cu")
    command = ["nvcc", *flags, f"-I{CSRC}", source, "-o", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize(
    ("module", "rounds"), [("tests.hostile_ring", 5), ("tests.scheduler_traces", 10)]
)
def test_a_block_of_gpu_threads_plans_the_same(library: Path, module: str, rounds: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, str(library), str(rounds)],
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
