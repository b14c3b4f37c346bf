"""Measures Blinkbed on a real GPU, part by part; each part writes JSON and takes minutes at most.

    python -m loadtests.bench_h200 --out RESULTS all
    python -m loadtests.bench_h200 --out RESULTS scheduler ring http-persistent ...

A part whose file is there already is skipped, so that a run can be resumed (--again repeats it).
Each part is a process of its own, ended after 8 minutes. Last comes the table of what has been
measured over HTTP, also in RESULTS/table.md.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from loadtests.bench_h200_table import read_parts, table

PARTS = {
    "check": "loadtests.bench_h200_kernels:check_part",
    "scheduler": "loadtests.bench_h200_scheduler:scheduler_part",
    "sanitizer": "loadtests.bench_h200_scheduler:sanitizer_part",
    "ring": "loadtests.bench_h200_scheduler:ring_part",
    "smollm2": "loadtests.bench_h200_http:smollm2_part",
    "http-persistent": "loadtests.bench_h200_http:persistent_part",
    "http-async": "loadtests.bench_h200_http:async_part",
    "http-sync": "loadtests.bench_h200_http:sync_part",
    "prefill": "loadtests.bench_h200_model:prefill_part",
    "profile": "loadtests.bench_h200_kernels:profile_part",
    "transformers": "loadtests.bench_h200_transformers:transformers_part",
}
"""What "all" does, in order."""
FURTHER_PARTS = {
    "gemm": "loadtests.bench_h200_kernels:gemm_part",
    "attention": "loadtests.bench_h200_attention:attention_part",
    "decode": "loadtests.bench_h200_model:decode_part",
    "batch": "loadtests.bench_h200_model:batch_part",
    "poisson": "loadtests.bench_h200_model:poisson_part",
    "long": "loadtests.bench_h200_model:long_part",
}
"""Tuning, and the loads through the ring alone."""
ALL = "all"
LIMIT_S = 480.0


def hardware() -> dict[str, Any]:
    """What the figures were taken on."""
    import torch
    import triton

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpu": gpu,
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }


def measure(part: str, out: Path) -> None:
    """Do one part in this process and write its file."""
    module, _, function = (PARTS | FURTHER_PARTS)[part].partition(":")
    started = time.monotonic()
    result = getattr(importlib.import_module(module), function)()
    result = {
        "part": part,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - started, 1),
        "hardware": hardware(),
        **result,
    }
    (out / f"{part}.json").write_text(json.dumps(result, indent=1) + "\n")


def measure_apart(part: str, out: Path) -> bool:
    """Do one part in a process of its own; False if it failed or took too long."""
    print(f"== {part}", flush=True)
    command = [sys.executable, "-m", "loadtests.bench_h200", "--out", str(out), "--here", part]
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            return process.wait(LIMIT_S) == 0
        except subprocess.TimeoutExpired:
            print(f"{part} did not end within {LIMIT_S:g} s", flush=True)
            os.killpg(process.pid, signal.SIGKILL)
            return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=[ALL, *PARTS, *FURTHER_PARTS])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--again", action="store_true", help="repeat parts that are there")
    parser.add_argument("--here", action="store_true", help="one part, in this process")
    arguments = parser.parse_args()
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    parts = list(PARTS) if ALL in arguments.parts else arguments.parts
    if arguments.here:
        try:
            measure(parts[0], out)
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    wanted = [part for part in parts if arguments.again or not (out / f"{part}.json").exists()]
    failed = [part for part in wanted if not measure_apart(part, out)]
    if measured := read_parts(out):
        text = table(measured)
        (out / "table.md").write_text(text + "\n")
        print(text)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
