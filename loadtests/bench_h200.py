"""Measures Blinkbed on a real GPU, part by part; each part writes JSON and takes minutes at most.

    python -m loadtests.bench_h200 --out RESULTS scheduler ring kernels model ...

A part whose file is there already is skipped, so that a run can be resumed (--again repeats it).
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PARTS = {
    "scheduler": "loadtests.bench_h200_scheduler:scheduler_part",
    "sanitizer": "loadtests.bench_h200_scheduler:sanitizer_part",
    "ring": "loadtests.bench_h200_scheduler:ring_part",
    "check": "loadtests.bench_h200_kernels:check_part",
    "gemm": "loadtests.bench_h200_kernels:gemm_part",
    "profile": "loadtests.bench_h200_kernels:profile_part",
    "attention": "loadtests.bench_h200_attention:attention_part",
    "decode": "loadtests.bench_h200_model:decode_part",
    "batch": "loadtests.bench_h200_model:batch_part",
    "poisson": "loadtests.bench_h200_model:poisson_part",
    "long": "loadtests.bench_h200_model:long_part",
    "prefill": "loadtests.bench_h200_model:prefill_part",
}


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--again", action="store_true", help="repeat parts that are there")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in arguments.parts:
        path = arguments.out / f"{part}.json"
        if path.exists() and not arguments.again:
            continue
        module, _, function = PARTS[part].partition(":")
        print(f"== {part}", flush=True)
        started = time.monotonic()
        try:
            result = getattr(importlib.import_module(module), function)()
        except Exception:
            traceback.print_exc()
            failed += 1
            continue
        result = {
            "part": part,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - started, 1),
            "hardware": hardware(),
            **result,
        }
        path.write_text(json.dumps(result, indent=1))
    return failed


if __name__ == "__main__":
    sys.exit(main())
