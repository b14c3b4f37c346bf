"""The demo's course: start, stream, freeze, thaw, check, report."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from engine.cli import words_of
from engine.config import ServeConfig, SmartnicConfig
from engine.demo.stream import TIMING_KEYS, ChatStream
from engine.demo.view import View, make_view
from engine.errors import UserError
from engine.freeze import Freeze
from engine.ready import ReadyLine
from engine.stack import Stack

PROMPTS = (
    "Explain how a bicycle stays upright.",
    "Write a short story about a lighthouse keeper.",
    "What is the difference between a virus and a bacterium?",
    "Give me a recipe for vegetable soup.",
    "Why is the sky blue?",
    "Describe a walk through a forest in autumn.",
)
MAX_TOKENS = 160
READY_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 240.0
FREEZE_AFTER_TOKENS = 8  # of every answer, so that all of them are under way
FREEZE_S = 4.0
MIN_FROZEN_TOKENS = 20
MAX_FREEZE_S = 30.0
DRAW_INTERVAL_S = 0.1


class DemoError(UserError):
    """The demo did not show what it is there to show."""


@dataclass(frozen=True, slots=True)
class Frozen:
    """What came while the host process and the launcher stood still."""

    start_s: float
    end_s: float
    late_tokens: int
    """Tokens that came in the second half: they cannot have been under way before."""


def run(config: ServeConfig, prompts: Sequence[str] = PROMPTS) -> int:
    """Run the whole demo; 0 if everything happened. Raises UserError with what did not."""
    if config.smartnic.port == SmartnicConfig().port:
        config = config.replace(smartnic=config.smartnic.replace(port=0))
    streams = [ChatStream(prompt, MAX_TOKENS) for prompt in prompts]
    with Stack(words_of(config), on_message=_relay) as stack:
        ready = stack.wait_ready(READY_TIMEOUT_S)
        view = make_view(streams)
        view.say(f"\n{len(streams)} answers at once from {ready.url}, temperature 0:\n")
        workers = [
            threading.Thread(target=stream.run, args=(ready.url, ready.model), daemon=True)
            for stream in streams
        ]
        for worker in workers:
            worker.start()
        try:
            frozen = _stream_and_freeze(streams, view, ready)
        finally:
            view.end()
        status = stack.stop()
    print(f"\n{table(streams, frozen)}\n\n{real_and_emulated(ready)}")
    check(streams, frozen, status)
    return 0


def _relay(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _stream_and_freeze(streams: Sequence[ChatStream], view: View, ready: ReadyLine) -> Frozen:
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    started_s = time.monotonic()
    while not all(s.is_over or s.num_tokens >= FREEZE_AFTER_TOKENS for s in streams):
        _fail_early(streams, deadline)
        view.draw(f"host and launcher running, {_num_tokens(streams)} tokens so far")
        time.sleep(DRAW_INTERVAL_S)
    if all(stream.is_over for stream in streams):
        raise DemoError("all answers ended before the host could be frozen")
    before = _num_tokens(streams)
    rate = before / (time.monotonic() - started_s)
    pids = (ready.host_pid, ready.launcher_pid)
    with Freeze(pids) as freeze:
        view.say(
            f"--- SIGSTOP to host ({pids[0]}) and launcher ({pids[1]}): both in state T; "
            f"{before} tokens so far, {rate:.0f} tokens/s"
        )
        while not _has_frozen_enough(streams, freeze):
            since_s = time.monotonic() - freeze.began_at
            came = _tokens_between(streams, freeze.began_at, time.monotonic())
            view.draw(f"host and launcher FROZEN for {since_s:.1f} s, {came} tokens since")
            time.sleep(DRAW_INTERVAL_S)
        if not freeze.holds():
            raise DemoError("host or launcher did not stay in state T: something woke them")
    span_s = freeze.ended_at - freeze.began_at
    came = _tokens_between(streams, freeze.began_at, freeze.ended_at)
    view.say(
        f"--- SIGCONT after {span_s:.1f} s: {came} tokens came while they stood still, "
        f"{came / span_s:.0f} tokens/s"
    )
    while not all(stream.is_over for stream in streams):
        _fail_early(streams, deadline)
        view.draw(f"host and launcher running again, {_num_tokens(streams)} tokens so far")
        time.sleep(DRAW_INTERVAL_S)
    late = _tokens_between(streams, freeze.began_at + span_s / 2, freeze.ended_at)
    return Frozen(freeze.began_at, freeze.ended_at, late)


def _has_frozen_enough(streams: Sequence[ChatStream], freeze: Freeze) -> bool:
    now = time.monotonic()
    since_s = now - freeze.began_at
    if since_s >= MAX_FREEZE_S or all(stream.is_over for stream in streams):
        return True
    came = _tokens_between(streams, freeze.began_at, now)
    return since_s >= FREEZE_S and came >= MIN_FROZEN_TOKENS


def _fail_early(streams: Sequence[ChatStream], deadline: float) -> None:
    for number, stream in enumerate(streams, 1):
        if stream.error is not None:
            raise DemoError(f"answer {number} failed: {stream.error}")
    if time.monotonic() > deadline:
        raise DemoError(f"the answers were not complete within {ANSWER_TIMEOUT_S:.0f} s")


def _num_tokens(streams: Sequence[ChatStream]) -> int:
    return sum(stream.num_tokens for stream in streams)


def _tokens_between(streams: Sequence[ChatStream], start_s: float, end_s: float) -> int:
    return sum(stream.tokens_between(start_s, end_s) for stream in streams)


def check(streams: Sequence[ChatStream], frozen: Frozen, status: int) -> None:
    """Raise DemoError unless all that the demo promises has happened."""
    for number, stream in enumerate(streams, 1):
        if stream.error is not None or stream.finish_reason not in ("stop", "length"):
            why = stream.error or f"finish reason {stream.finish_reason}"
            raise DemoError(f"answer {number} is not complete: {why}")
        missing = [key for key in TIMING_KEYS if stream.timing.get(key) is None]
        if missing:
            raise DemoError(f"the server gave no {', '.join(missing)} for answer {number}")
    if not _tokens_between(streams, frozen.start_s, frozen.end_s):
        raise DemoError("no token came while the host was frozen")
    if not frozen.late_tokens and any(
        s.arrivals and s.arrivals[-1][0] > frozen.end_s for s in streams
    ):
        raise DemoError("tokens stopped coming while the host was frozen")
    if status != 0:
        raise DemoError(f"the server did not drain cleanly: exit status {status}")


def table(streams: Sequence[ChatStream], frozen: Frozen) -> str:
    """Per request: where its time went, its rate, and what came during the freeze."""
    heads = ("request", "tokens", "queue ms", "link ms", "prefill ms", "decode ms", "tokens/s")
    lines = ["  ".join([*(f"{head:>10}" for head in heads), "while frozen  end"])]
    for number, stream in enumerate(streams, 1):
        times = (stream.timing.get(key) for key in TIMING_KEYS)
        cells = [
            f"{number:>10}",
            f"{stream.num_tokens:>10}",
            *(f"{'-' if value is None else f'{value:.2f}':>10}" for value in times),
            f"{stream.tokens_per_s:>10.1f}",
            f"{stream.tokens_between(frozen.start_s, frozen.end_s):>12}",
            stream.finish_reason or "-",
        ]
        lines.append("  ".join(cells))
    lines.append("link: both ways, with the wait for the device's next look at the doorbell")
    return "\n".join(lines)


def real_and_emulated(ready: ReadyLine) -> str:
    """One line: what ran as it would on the real machines, and what something stood in for."""
    model = "scripted model" if ready.model.startswith("scripted") else f"model {ready.model}"
    stand_ins = {
        ("device", "sim"): "GPU (a process of its own computing on the CPU)",
        ("link", "shm"): "RDMA (one-sided writes and reads of shared memory)",
    }
    emulated = [
        text for (role, choice), text in stand_ins.items() if getattr(ready, role) == choice
    ]
    emulated.append("the SmartNIC's own cores (a process of this machine)")
    if ready.model.startswith("scripted"):
        emulated.append(model)
    real = ["HTTP", "ring protocol", "device-resident scheduler", "frozen host process"]
    if not ready.model.startswith("scripted"):
        real.insert(0, f"{model}, its weights and tokenizer")
    return f"Real: {', '.join(real)}. Emulated: {', '.join(emulated)}; window in {ready.window}."
