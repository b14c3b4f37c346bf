"""``blinkbed serve --device cuda`` over HTTP: every load of the table, idle and under interference,
and with the host frozen.

    python -m loadtests.bench_h200_http --out results --model random:8b [--path persistent]
        [--check tests/reference/smollm2_greedy.json] [-- further flags of serve]

The SmartNIC's process and the client have cores of their own (two for each), as a DPU and another
machine have; the host process shares the others with the interference. Prints one JSON object, also
written to OUT/http-MODEL-PATH.json. Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from engine.freeze import Freeze
from engine.stack import Stack
from loadtests.bench_h200_model import interference
from loadtests.compare.figures import device_figures, per_token
from loadtests.compare.observe import EnergyMeter, scrape, wait_idle

READY_TIMEOUT_S = 400.0
IDLE_TIMEOUT_S = 10.0
NIC_CORES, CLIENT_CORES = {0, 1}, {2, 3}
FREEZE_AFTER_S, FREEZE_S = 1.0, 10.0
RECEIVE_BYTES = 1 << 20
SERVE_8B = (
    *("--max-context", "8448", "--num-pages", "24576", "--token-ring-entries", "65536"),
    *("--max-step-tokens", "2048", "--ring-slots", "1024", "--max-running", "256"),
)
PROMPT_IDS = 2048  # prompts are random ids below this


@dataclass(frozen=True, slots=True)
class Load:
    """Requests: all at once, or `rate_per_s` at random times."""

    count: int
    num_prompt: int
    num_tokens: int
    rate_per_s: float = 0.0

    def bodies(self) -> list[dict[str, Any]]:
        """Requests of random ids that run to their full length."""
        shape = self.count, self.num_prompt
        prompts = np.random.default_rng(2).integers(0, PROMPT_IDS, shape).tolist()
        rest = {"max_tokens": self.num_tokens, "temperature": 0, "ignore_eos": True}
        return [{"prompt": prompt, **rest} for prompt in prompts]

    def delays_s(self) -> list[float]:
        """When each is sent, from the begin."""
        if not self.rate_per_s:
            return [0.0] * self.count
        gaps = np.random.default_rng(1).exponential(1 / self.rate_per_s, self.count)
        return [float(one) for one in np.cumsum(gaps)]


DECODE = "32 x 512"
LONG = "32 x 8000"
LOADS = {
    DECODE: Load(32, 100, 512),
    "8 req/s": Load(120, 512, 128, 8.0),
    "24 req/s": Load(360, 512, 128, 24.0),
    "256 x 256": Load(256, 100, 256),
    LONG: Load(32, 100, 8000),
}
SMALL_LOADS = {DECODE: LOADS[DECODE]}


@dataclass(slots=True)
class Stream:
    """One streamed completion; times are monotonic seconds."""

    started_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""


async def complete(url: str, body: dict[str, Any]) -> Stream:
    """One request, read to its end; raises RuntimeError for an answer that is none."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=RECEIVE_BYTES)
    content = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    stream = Stream(started_s=time.monotonic())
    writer.write(head + content)
    status = (await reader.readline()).split()
    if status[1:2] != [b"200"]:
        raise RuntimeError((await reader.read()).decode(errors="replace"))
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(str(event["error"]))
        for choice in event["choices"]:
            ids = choice.get("token_ids") or []
            stream.token_ids += ids
            stream.arrivals_s += [time.monotonic()] * len(ids)
            stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
    writer.close()
    return stream


async def send(url: str, load: Load) -> list[Stream]:
    """All requests of a load, to their ends."""

    async def later(delay_s: float, body: dict[str, Any]) -> Stream:
        await asyncio.sleep(delay_s)
        return await complete(url, body)

    return list(await asyncio.gather(*map(later, load.delays_s(), load.bodies())))


def figures(streams: list[Stream]) -> dict[str, Any]:
    """What the clients saw, milliseconds."""
    first = min(stream.started_s for stream in streams)
    last = max(stream.arrivals_s[-1] for stream in streams)
    num_tokens = sum(len(stream.token_ids) for stream in streams)
    tpot = [(s.arrivals_s[-1] - s.arrivals_s[0]) / (len(s.token_ids) - 1) for s in streams]
    ttft = [s.arrivals_s[0] - s.started_s for s in streams]
    gaps = np.concatenate([np.diff(stream.arrivals_s) for stream in streams])
    return {
        "tokens_per_s": round(num_tokens / (last - first), 1),
        "ms_per_token_of_a_stream_with_prefill": round(
            1e3 * (last - first) / max(len(s.token_ids) for s in streams), 3
        ),
        **{
            f"{name}_{q}_ms": round(1e3 * float(np.percentile(values, share)), 3)
            for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", gaps))
            for q, share in (("p50", 50), ("p99", 99))
        },
        "longest_gap_ms": round(1e3 * float(gaps.max()), 3),
        "complete": all(s.finish_reason == "length" for s in streams),
    }


def measured(url: str, load: Load, meter: EnergyMeter) -> dict[str, Any]:
    """What clients, the device's own clock and NVML say of a load."""
    before, before_joules = scrape(url), meter.joules()
    began_s = time.monotonic()
    streams = asyncio.run(send(url, load))
    wait_idle(url, IDLE_TIMEOUT_S)
    joules, span_s = meter.joules(), time.monotonic() - began_s
    device = device_figures(before, scrape(url), span_s)
    spent = None if joules is None or before_joules is None else joules - before_joules
    energy = per_token(spent, device["device_tokens"])
    return {
        **figures(streams),
        **{name: device[name] for name in ("num_steps", "mean_step_ms", "mean_gap_ms")},
        "gap_share": device["gap_share"],
        "joules_per_token": None if energy is None else round(energy, 5),
    }


async def frozen(url: str, load: Load, pids: list[int]) -> dict[str, Any]:
    """The host frozen from FREEZE_AFTER_S on for FREEZE_S; requests are made inside as well."""
    running = asyncio.create_task(send(url, load))
    await asyncio.sleep(FREEZE_AFTER_S)
    with Freeze(pids) as freeze:
        end = time.monotonic() + FREEZE_S
        streams = await running
        while time.monotonic() < end:
            again = await send(url, load)
        held = freeze.holds()
    return {
        "held_in_state_t": held,
        "frozen_s": round(freeze.ended_at - freeze.began_at, 2),
        "begun_before": figures(streams),
        "begun_inside": figures(again),
        "same_tokens": [s.token_ids for s in streams] == [s.token_ids for s in again],
    }


async def stalled(url: str, load: Load, pids: list[int]) -> dict[str, Any]:
    """As frozen, where the host drives the steps: nothing comes until it goes on."""
    running = asyncio.create_task(send(url, load))
    await asyncio.sleep(FREEZE_AFTER_S)
    with Freeze(pids) as freeze:
        await asyncio.sleep(FREEZE_S)
    streams = await running
    frozen_s = round(freeze.ended_at - freeze.began_at, 2)
    return {"frozen_s": frozen_s, "begun_before": figures(streams)}


def check(url: str, path: Path) -> dict[str, Any]:
    """Greedy ids against the float32 reference, up to its safe tokens."""
    entries = json.loads(path.read_text())
    agreed = []
    for entry in entries:
        count = entry["safe_tokens"]
        body = {"prompt": entry["prompt_ids"], "max_tokens": count, "temperature": 0}
        got = asyncio.run(complete(url, {**body, "ignore_eos": True})).token_ids
        expected = entry["output_ids"][:count]
        same = [a == b for a, b in zip(got, expected, strict=False)]
        agreed.append((same.index(False) if False in same else len(same), count))
    return {
        "prompts": len(agreed),
        "equal": sum(common == count for common, count in agreed),
        "tokens_before_the_first_difference": agreed,
    }


def pin(stack_pids: dict[str, int]) -> dict[str, str]:
    """The cores of each role, for all threads of its process."""
    others = os.sched_getaffinity(0) - NIC_CORES - CLIENT_CORES
    sets = {"smartnic": NIC_CORES, "host": others}
    for role, cores in sets.items():
        for thread in Path(f"/proc/{stack_pids[role]}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
    os.sched_setaffinity(0, CLIENT_CORES)
    return {**{role: str(sorted(cores)) for role, cores in sets.items()}, "client": "2, 3"}


def measure(url: str, pids: dict[str, int], loads: dict[str, Load], path: str) -> dict[str, Any]:
    """All figures of one server, by load."""
    meter = EnergyMeter("cuda")
    result: dict[str, Any] = {"cores": pin(pids), "energy_source": meter.reason}
    asyncio.run(send(url, LOADS[DECODE]))  # warm

    def note(name: str, condition: str) -> None:
        result.setdefault(name, {})[condition] = found = measured(url, loads[name], meter)
        print(name, condition, json.dumps(found), file=sys.stderr, flush=True)

    for name in loads:
        note(name, "idle")
    note(DECODE, "idle again")
    host_cores = os.sched_getaffinity(pids["host"])
    with interference(host_cores) as burners:
        result["burners"] = burners
        for name in loads:
            if name != LONG or path == "persistent":  # minutes otherwise
                note(name, "interference")
    freeze = frozen if path == "persistent" else stalled
    host = [pids["host"], pids["launcher"]]
    result["host_frozen"] = asyncio.run(freeze(url, loads[DECODE], host))
    return result


def hardware() -> str:
    """The GPU and its driver."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def run(
    model: str, path: str, flags: Sequence[str] = SERVE_8B, reference: Path | None = None
) -> dict[str, Any]:
    """Serve and measure; the greedy ids are compared with `reference` where it is given."""
    words = ["--device", "cuda", "--model", model, "--path", path, "--port", "0"]
    # So that streams outlive the freeze where the host's loop beats the heart.
    words += ["--heartbeat-timeout-s", "30", *flags]
    started = time.monotonic()
    with Stack(words, on_message=lambda line: print(line, file=sys.stderr, flush=True)) as stack:
        ready = stack.wait_ready(READY_TIMEOUT_S)
        pids = {
            "host": ready.host_pid, "smartnic": ready.smartnic_pid, "launcher": ready.launcher_pid
        }  # fmt: skip
        result: dict[str, Any] = {
            "model": model,
            "path": path,
            "serve": list(flags),
            "hardware": hardware(),
            "date": time.strftime("%Y-%m-%d"),
            "window": ready.window,
            "emulated": "RDMA (shared memory), the SmartNIC's cores (two of this machine)",
            "start_s": round(time.monotonic() - started, 1),
        }
        if reference:
            result["reference"] = check(ready.url, reference)
        loads = LOADS if model == "random:8b" else SMALL_LOADS
        result |= measure(ready.url, pids, loads, path)
        result["exit_status"] = stack.stop()
    return result


def persistent_part() -> dict[str, Any]:
    return run("random:8b", "persistent")


def async_part() -> dict[str, Any]:
    return run("random:8b", "async")


def sync_part() -> dict[str, Any]:
    return run("random:8b", "sync")


def smollm2_part() -> dict[str, Any]:
    reference = Path("tests/reference/smollm2_greedy.json")
    return run("smollm2", "persistent", ("--max-running", "32"), reference)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.bench_h200_http", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="random:8b")
    parser.add_argument("--path", default="persistent")
    parser.add_argument("--check", type=Path, help="greedy reference to compare with")
    parser.add_argument("serve", nargs="*", default=SERVE_8B, help="flags of serve, after --")
    arguments = parser.parse_args(words)
    result = run(arguments.model, arguments.path, arguments.serve, arguments.check)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = f"http-{arguments.model.replace(':', '-')}-{arguments.path}.json"
    (arguments.out / name).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
