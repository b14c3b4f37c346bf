"""How attention is cut up, by the time of a whole pass (the choices are in cuda_forward.py)."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from engine.model.cuda_forward import Tuning
from engine.model.cuda_random import SHAPES, random_spec
from engine.model.cuda_weights import random_device_weights
from loadtests.bench_h200_kernels import graph_time_us, in_processes, kernel_times
from tests.cuda_model import CudaModel

LOADS = ((8, 8, 360), (32, 32, 360), (32, 32, 4000), (256, 256, 228))
"""Bucket, rows, context."""
PREFILL = ((576, 512, 20), (1024, 1024, 0))
"""Bucket, tokens of one prompt, rows of decode beside it."""


def _variants() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        "default": {},
        "never apart": {"attention_apart": (1, 0)},
        "always apart": {"attention_apart": (1, 1 << 30)},
        "64 pages": {"attention_chunk": 64},
        "parts of 1 block": {"attention_least_blocks": 1},
        "parts of 4 blocks": {"attention_least_blocks": 4},
        "528 programs": {"attention_programs": 528},
    }
    for block, stages, warps in ((64, 2, 4), (64, 4, 4), (64, 3, 8), (128, 3, 8), (32, 5, 4)):
        found[f"{block} keys, {stages} stages, {warps} warps"] = {
            "attention_block": block, "attention_stages": stages, "attention_warps": warps
        }  # fmt: skip
    return found


def _model(weights: Any, layers: int, tuning: Tuning, bucket: int, context: int) -> CudaModel:
    spec = dataclasses.replace(SHAPES["8b"], num_layers=layers)
    return CudaModel(
        spec,
        weights,
        num_seqs=min(bucket, 256),
        max_context=context + 16 & ~15,
        max_tokens=bucket,
        tuning=tuning,
    )


def _work(tokens: int, rows: int, context: int) -> list[tuple[int, int, int]]:
    decodes = [(s, context, 1) for s in range(rows)]
    return decodes + ([(rows, 0, tokens)] if tokens > rows else [])


def _compile(changes: dict[str, Any]) -> None:
    """A pass of one layer for each load, so that the compiler's cache has its kernels."""
    tuning = dataclasses.replace(Tuning(), **changes)
    spec = dataclasses.replace(SHAPES["8b"], num_layers=1)
    weights = random_device_weights(spec, torch.device("cuda"), torch.bfloat16)
    for bucket in (8, 32, 256):
        try:
            _model(weights, 1, tuning, bucket, 360).pass_.launch(bucket)
        except Exception as error:  # shared memory, mostly: said again where it is measured
            print(changes, str(error)[:80], flush=True)
    torch.cuda.synchronize()


def attention_part() -> dict[str, Any]:
    """Microseconds of a pass by variant and load, and the kernels of the widest one."""
    variants = _variants()
    in_processes(_compile, list(variants.values()))
    weights = random_device_weights(random_spec("random:8b"), torch.device("cuda"), torch.bfloat16)
    table: dict[str, Any] = {}
    for name, changes in variants.items():
        tuning = dataclasses.replace(Tuning(), **changes)
        row: dict[str, Any] = {}
        for bucket, rows, context in LOADS:
            try:
                model = _model(weights, 32, tuning, bucket, context)
                model.plan(_work(rows, rows, context))
                body = functools.partial(model.pass_.launch, bucket)
                row[f"{rows} rows at {context}"] = round(graph_time_us(body), 1)
            except Exception as error:
                row[f"{rows} rows at {context}"] = str(error)[:60]
            if name == "default":
                kernels = kernel_times(model, _work(rows, rows, context), bucket)
                table[f"kernels, {bucket}"] = kernels
            del model
            torch.cuda.empty_cache()
        for bucket, tokens, rows in PREFILL if name == "default" else ():
            model = _model(weights, 32, tuning, bucket, 1024)
            model.plan(_work(tokens, rows, 360))
            body = functools.partial(model.pass_.launch, bucket)
            row[f"{tokens} tokens beside {rows} rows"] = round(graph_time_us(body), 1)
            if name == "default":
                table[f"kernels, {bucket}"] = kernel_times(model, _work(tokens, rows, 360), bucket)
            del model
            torch.cuda.empty_cache()
        table[name] = row
        print(name, row, flush=True)
    return table
