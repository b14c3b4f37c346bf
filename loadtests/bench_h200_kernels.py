"""Correctness of the forward pass and the sampler on the GPU, and where their time goes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import cupy
import numpy as np
import torch

from engine.model.cuda_forward import LOGITS, QKV, RESIDUAL, SILU, CudaForward, Tile, Tuning
from engine.model.cuda_random import SHAPES
from engine.model.cuda_weights import load_weights, random_device_weights, random_weights
from tests.cuda_model import CudaModel, reference_logits
from tests.sampler_cases import Agreement, random_rows

SPLIT = Tile(32, 64, split_k=2, stages=3)
TUNINGS = {
    "default": Tuning(pdl=False),
    "pdl": Tuning(),
    "plain": Tuning(
        qkv=Tile(32, 128), o=Tile(32, 128), gate_up=Tile(32, 128), down=Tile(32, 128),
        head=Tile(64, 128),
    ),
    "split": Tuning(qkv=SPLIT, o=SPLIT, down=SPLIT),
    "swap": Tuning(
        qkv=Tile(64, 64, swap=True), o=Tile(64, 64, swap=True, split_k=2),
        gate_up=Tile(64, 64, swap=True), down=Tile(64, 64, swap=True),
        head=Tile(64, 64, swap=True),
    ),
    "wide": Tuning(widest_skinny=0),
}  # fmt: skip
TINY = SHAPES["tiny"]
SPECS = {
    "llama": TINY,
    "group of 3, tied": dataclasses.replace(
        TINY, num_heads=9, num_kv_heads=3, hidden_size=576, mlp_size=1536, tied_embeddings=True
    ),
    "bias, 128": dataclasses.replace(TINY, num_heads=4, head_dim=128, qkv_bias=True),
    "head norms": dataclasses.replace(TINY, qk_norm=True),
}


def forward_error(spec: Any, tuning: Tuning) -> float:
    """Worst relative error of logits against float64, over prefill, mixed and decode steps."""
    raw = {
        n: v if v.ndim == 1 else torch.from_numpy(v).bfloat16().float().numpy()
        for n, v in random_weights(spec)
    }
    weights = load_weights(spec, raw.items(), torch.device("cuda"), torch.bfloat16)
    model = CudaModel(spec, weights, num_seqs=64, max_context=512, tuning=tuning)
    rng = np.random.default_rng(3)
    lengths = rng.integers(3, 400, 24)
    model.history[:24] = rng.integers(0, spec.vocab_size, (24, 512))
    wanted = {n: torch.from_numpy(v).double().cuda() for n, v in raw.items()}
    ids = torch.from_numpy(model.history[:24].astype(np.int64)).cuda()
    expected = [reference_logits(spec, wanted, ids[s, : lengths[s] + 2]) for s in range(24)]
    worst = 0.0

    def step(work: list[tuple[int, int, int]], bucket: int) -> None:
        nonlocal worst
        model.plan(work)
        model.pass_.forward.logits.fill_(float("nan"))
        model.pass_.launch(bucket)
        torch.cuda.synchronize()
        for row, (seq, first, count) in enumerate(work):
            want = expected[seq][first + count - 1]
            error = (model.pass_.forward.logits[row].double() - want).norm() / want.norm()
            worst = max(worst, float(error)) if float(error) == float(error) else float("inf")

    for seq in range(24):  # prompts in chunks, two rows at times
        first, left = 0, int(lengths[seq])
        while left:
            count = min(left, int(rng.integers(1, 60)))
            step([(seq, first, count)], 64 if seq % 2 else 256)
            first, left = first + count, left - count
    decode = [(s, int(lengths[s]), 1) for s in range(24)]
    step(decode[:13], 16)
    step(decode, 32)
    step(decode, 256)
    step([(s, f + 1, 1) for s, f, _ in decode[:20]] + [(20, int(lengths[20]), 2)], 64)
    return worst


def sampler_agreement(cases: int = 40) -> dict[str, Any]:
    """How many draws are those of engine/model/sampling.py, on the same logits and numbers."""
    spec = dataclasses.replace(TINY, vocab_size=32000)
    weights = random_device_weights(spec, torch.device("cuda"), torch.bfloat16)
    model = CudaModel(spec, weights, num_seqs=64, max_context=512)
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((64, spec.vocab_size)).astype(np.float32)
    logits *= rng.choice([0.1, 1.0, 4.0], 64)[:, None].astype(np.float32)
    model.history[:] = rng.integers(0, spec.vocab_size, model.history.shape)
    model.history[:, ::3] = rng.integers(0, 50, model.history[:, ::3].shape)
    records = np.zeros((64, model.memory.geometry.slot_bytes), np.uint8)
    agreement = Agreement(spec.eos_ids)
    for _ in range(cases):
        rows = random_rows(rng, 64, records, spec.vocab_size, spec.eos_ids)
        model.memory.arrays["records"].set(records.reshape(-1))
        model.upload(rows, 64, 64)
        model.pass_.forward.logits.copy_(torch.from_numpy(logits))
        sample(model)
        results, alternatives = model.results(64), model.alternatives(64)
        for i, row in enumerate(rows):
            known = model.history[i, : int(row["first_position"]) + 1]
            agreement.add(logits[i], row, known, records[i], results[i], alternatives[i])
    return agreement.summary()


def sample(model: CudaModel) -> None:
    model.pass_.sample(64)
    cupy.cuda.Device().synchronize()
    assert not bool(model.pass_._seen.any())


def in_processes(
    function: Callable[[Any], Any], items: Iterable[Any], workers: int = 12
) -> list[Any]:
    """Each item in one of several processes: compiling kernels takes a core each."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        return list(pool.map(function, items))


def check_case(case: tuple[str, str]) -> float | str:
    """One model under one tuning; sampler agreement for ("sampler", "")."""
    name, kind = case
    try:
        if name == "sampler":
            return str(sampler_agreement())
        return forward_error(SPECS[name], TUNINGS[kind])
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:1500]


def product_error(f: CudaForward, name: str, tile: Tile, tokens: int) -> float:
    """Relative error of one skinny product against float32, at position 0 (no rotation)."""
    a, w, out = operands(f, name, 0)
    for buffer in (f.x, f.attended, f.hidden, f.normed):
        buffer.normal_()
    f.positions.zero_()
    f.kv_slots.fill_(-1)
    f.last_tokens.copy_(torch.arange(f.last_tokens.numel(), device="cuda"))
    f.squares[0, :tokens] = a[:tokens].float().square().sum(1)
    x = a[:tokens].float()
    want = x @ w.float().T
    if GEMMS[name] == RESIDUAL:
        want += out[:tokens].float()
    else:
        want *= torch.rsqrt(x.square().mean(1, keepdim=True) + f.spec.norm_eps)
    if name == "gate_up":
        gate, up = want[:, 0::2], want[:, 1::2]
        want = torch.nn.functional.silu(gate) * up
    if name == "qkv":
        want = want[:, : f.spec.q_size]
    product(f, name, 0, tile, tokens)
    torch.cuda.synchronize()
    got = out[:tokens].float()
    if GEMMS[name] == RESIDUAL:
        tiles = f._tiles(tile)
        parts = f.squares[:tiles, :tokens].sum(0)
        squares = float(((parts - got.square().sum(1)).abs() / parts).max())
        if squares > 1e-2:
            return 100 + squares
    return float((got - want).norm() / want.norm())


def check_products(kind: str) -> dict[str, float | str]:
    spec = TINY if kind == "tiny" else SPECS["group of 3, tied"]
    weights = random_device_weights(spec, torch.device("cuda"), torch.bfloat16)
    f = CudaModel(spec, weights).pass_.forward
    errors: dict[str, float | str] = {}
    tiles = (
        Tile(32, 128), Tile(32, 128, stages=2), Tile(32, 64, stages=3), Tile(32, 64, swap=True),
        Tile(64, 64, swap=True), Tile(64, 64, stages=2, swap=True), Tile(64, 64, 2, swap=True),
        Tile(32, 64, 2), Tile(64, 32, swap=True),
    )  # fmt: skip
    for name, tile in itertools.product(GEMMS, tiles):
        if tile.split_k > 1 and name in ("gate_up", "head"):
            continue
        try:
            error: float | str = round(product_error(f, name, tile, 32), 5)
        except Exception as failure:
            error = str(failure)[:200]
        errors[f"{kind} {name} {list(dataclasses.asdict(tile).values())}"] = error
    return errors


def check_part() -> dict[str, Any]:
    products_errors: dict[str, float | str] = {}
    for part in in_processes(check_products, ("tiny", "group")):
        products_errors.update(part)
    for name, wrong in products_errors.items():
        if not isinstance(wrong, float) or not wrong < 0.01:
            print("product", name, wrong, flush=True)
    print(len(products_errors), "products checked", flush=True)
    cases = [
        case
        for case in itertools.product(SPECS, TUNINGS)
        if case[0] == "llama" or case[1] in ("pdl", "wide")
    ]
    cases.append(("sampler", ""))
    errors = dict(zip(map(", ".join, cases), in_processes(check_case, cases), strict=True))
    for name, error in errors.items():
        print(name, error, flush=True)
    agreement = errors.pop("sampler, ")
    return {"products": products_errors, "relative_logit_error": errors, "sampler": agreement}


# ---- Time

GEMMS = {"qkv": QKV, "o": RESIDUAL, "gate_up": SILU, "down": RESIDUAL, "head": LOGITS}


def make_8b(tuning: Tuning, layers: int = 32, **changes: Any) -> CudaModel:
    spec = dataclasses.replace(SHAPES["8b"], num_layers=layers)
    weights = random_device_weights(spec, torch.device("cuda"), torch.bfloat16)
    sizes = {"num_seqs": 64, "max_context": 1024, "max_tokens": 256, **changes}
    return CudaModel(spec, weights, tuning=tuning, **sizes)


def graph_time_us(body: Any, repeats: int = 5, replays: int = 8) -> float:
    """Median time of one replay of what `body` enqueues, captured once."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        body()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        body()
    times: list[float] = []
    for _ in range(repeats):
        event: Any = torch.cuda.Event
        start, end = (event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            start.record()
            for _ in range(replays):
                graph.replay()
            end.record()
        stream.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / replays)
    return statistics.median(times)


def operands(f: CudaForward, name: str, layer: int) -> tuple[torch.Tensor, ...]:
    """Input, weights and output of one product."""
    w = f.weights["head" if name == "head" else f"layers.{layer}.{name}"]
    a = {"qkv": f.x, "o": f.attended, "gate_up": f.x, "down": f.hidden, "head": f.x}[name]
    out = {"qkv": f.q, "o": f.normed, "gate_up": f.hidden, "down": f.normed, "head": f.logits}[name]
    return a, w, out


def product(f: CudaForward, name: str, layer: int, tile: Tile, tokens: int) -> None:
    a, w, out = operands(f, name, layer)
    kv = f.kv_cache[layer] if name == "qkv" else None
    f._skinny(a, w, out, GEMMS[name], tile, tokens, kv=kv)


def products(f: CudaForward, name: str, tile: Tile, calls: int) -> None:
    for layer in range(calls):
        product(f, name, layer, tile, 32)


def candidates(name: str) -> list[Tile]:
    small = name in ("qkv", "o", "down")
    tiles = []
    shapes = ((64, 128, 4, 4), (64, 256, 3, 4), (64, 128, 5, 4), (128, 128, 3, 8), (128, 128, 4, 8),
              (128, 64, 6, 8))  # fmt: skip
    for bn, bk, stages, warps in shapes:
        for split in (1, 2, 3, 4) if small else (1,):
            tiles.append(Tile(bn, bk, split, stages, warps, swap=True))
    if name == "gate_up":
        tiles = [dataclasses.replace(t, bn=64) if t.bn == 128 else t for t in tiles]
    return tiles


@functools.cache
def small_model(pdl: bool) -> CudaModel:
    return make_8b(Tuning(pdl=pdl), layers=1, max_tokens=64)


def compile_tile(case: tuple[str, bool, Tile]) -> None:
    """Run one product once, so that the compiler's cache has it."""
    name, pdl, tile = case
    try:
        product(small_model(pdl).pass_.forward, name, 0, tile, 32)
    except Exception as error:  # shared memory, mostly: said again where it is measured
        print(name, tile, str(error)[:80], flush=True)


def gemm_part() -> dict[str, Any]:
    """Each product over the weights of 8 layers (out of the L2), in one graph, by tile."""
    tokens, layers = 32, 8
    results: dict[str, Any] = {}
    in_processes(compile_tile, [(n, p, t) for n in GEMMS for t in candidates(n) for p in (False,)])
    for pdl in (False, True):
        model = make_8b(Tuning(pdl=pdl, widest_skinny=64), layers)
        f = model.pass_.forward
        f.x.normal_()
        f.attended.normal_()
        f.hidden.normal_()
        model.plan([(s, 500, 1) for s in range(tokens)])
        model.pass_.launch(tokens)
        for name in GEMMS:
            w = f.weights["head" if name == "head" else f"layers.0.{name}"]
            calls = 2 if name == "head" else layers
            floor = w.numel() * 2 / 4.3e6
            rows: list[dict[str, Any]] = []
            best = results.get(f"{name}, pdl=False")
            tiles = candidates(name)
            if pdl and best:  # the best few
                tiles = [Tile(**r["tile"]) for r in best["rows"][:3]]
            for tile in tiles:
                try:
                    us = graph_time_us(functools.partial(products, f, name, tile, calls)) / calls
                except Exception as error:
                    print(name, tile, type(error).__name__, str(error)[:100], flush=True)
                    continue
                wrong = product_error(f, name, tile, tokens)
                if not wrong < 0.01:
                    print("WRONG", name, tile, wrong, flush=True)
                rows.append(
                    {"us": round(us, 2), "error": round(wrong, 5), "tile": dataclasses.asdict(tile)}
                )
            rows.sort(key=lambda r: r["us"])
            results[f"{name}, pdl={pdl}"] = {"floor_us": round(floor, 2), "rows": rows}
            print(name, "pdl", pdl, f"floor {floor:.1f}", flush=True)
            for r in rows[:4]:
                print("   ", r["us"], list(r["tile"].values()), flush=True)
        torch.cuda.empty_cache()
    return {"tokens": tokens, "products": results}


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "no PDL": {"pdl": False},
    "gate 128": {"gate_up": Tile(128, 128, warps=8, swap=True)},
    "gate 128, 4 warps": {"gate_up": Tile(128, 128, swap=True)},
    "library": {"widest_skinny": 0},
}  # fmt: skip


def profile_part() -> dict[str, Any]:
    """One pass of the 8B shape: 32 sequences at 360 tokens, whole and kernel by kernel."""
    table: dict[str, Any] = {}
    spec = SHAPES["8b"]
    weights = random_device_weights(spec, torch.device("cuda"), torch.bfloat16)
    in_processes(compile_variant, VARIANTS)
    for name, changes in VARIANTS.items():
        tuning = dataclasses.replace(Tuning(), **changes)
        model = CudaModel(spec, weights, max_context=4096, tuning=tuning)
        is_attention = any("attention" in change for change in changes)
        loads = [(32, 360)]
        if not changes:
            loads += [(8, 360), (64, 360), (32, 0)]
        if not changes or is_attention:
            loads += [(32, 1600), (32, 4000)]
        for rows, context in loads:
            model.plan([(s, context, 1) for s in range(rows)])
            us = graph_time_us(functools.partial(model.pass_.launch, rows))
            table[f"{name}, {rows} rows at {context}"] = round(us, 1)
            print(f"{name}, {rows} rows at {context}: {us:.1f} us", flush=True)
        if name == "default":
            for bucket in (32, 256):
                table[f"kernels_us, {bucket}"] = kernel_times(
                    model, [(s, 360, 1) for s in range(min(bucket, 64))], bucket
                )
        del model
        torch.cuda.empty_cache()
    return table


def compile_variant(name: str) -> None:
    """Run one pass of one layer, so that the compiler's cache has its kernels."""
    tuning = dataclasses.replace(Tuning(), **VARIANTS[name])
    model = make_8b(tuning, layers=1, max_context=4096)
    model.plan([(s, 360, 1) for s in range(32)])
    model.pass_.launch(32)
    torch.cuda.synchronize()


def kernel_times(model: CudaModel, work: list[tuple[int, int, int]], bucket: int) -> dict[str, Any]:
    from torch.profiler import ProfilerActivity, profile

    model.plan(work)
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(3):
            model.pass_.launch(bucket)
        torch.cuda.synchronize()
    times = {}
    events = [e for e in prof.key_averages() if e.device_time_total > 0]
    for event in sorted(events, key=lambda e: -e.device_time_total)[:12]:
        times[event.key[:100]] = {
            "calls": event.count // 3, "us_each": round(event.device_time_total / event.count, 2)
        }  # fmt: skip
    print("  ", {k[-30:]: (v["calls"], v["us_each"]) for k, v in times.items()}, flush=True)
    return times
