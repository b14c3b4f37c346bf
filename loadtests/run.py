"""``make load``: start a server, put it under load by Locust, and judge the result by gates.

    python -m loadtests.run --model smollm2 --users 8 --seconds 30

The load goes over loopback to a server that this program starts (or to ``--url``) and is bounded
in time. Exit status 0 when both gates hold: the share of failed requests, and the p99 of TTFT.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.stack import Stack

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
READY_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 60.0
STARTUP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """How much load, for how long."""

    users: int
    seconds: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Gates:
    """What the result must keep."""

    max_error_share: float
    max_ttft_p99_ms: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the users saw; times in milliseconds, sorted."""

    num_requests: int
    num_failures: int
    num_tokens: int
    span_s: float
    ttft_ms: list[float]
    tpot_ms: list[float]
    failures: dict[str, int]

    @classmethod
    def from_samples(cls, samples: dict[str, Any]) -> Outcome:
        """From what the locustfile wrote."""
        return cls(
            num_requests=samples["num_requests"],
            num_failures=samples["num_failures"],
            num_tokens=samples["num_tokens"],
            span_s=samples["last_s"] - samples["first_s"],
            ttft_ms=sorted(samples["ttft_ms"]),
            tpot_ms=sorted(samples["tpot_ms"]),
            failures=samples["failures"],
        )

    def broken_gates(self, gates: Gates) -> list[str]:
        """One sentence for each gate that does not hold."""
        broken = []
        if self.num_requests == 0:
            return ["no request was made"]
        share = self.num_failures / self.num_requests
        if share > gates.max_error_share:
            broken.append(
                f"{share:.2%} of the requests failed, {gates.max_error_share:.2%} allowed"
            )
        if not self.ttft_ms:
            broken.append("no answer had a first token")
        elif (p99 := percentile(self.ttft_ms, 99)) > gates.max_ttft_p99_ms:
            broken.append(f"TTFT p99 is {p99:.1f} ms, {gates.max_ttft_p99_ms:g} ms allowed")
        return broken

    def table(self) -> str:
        """The result for people."""
        rate = self.num_tokens / self.span_s if self.span_s > 0 else 0.0
        lines = [
            f"requests {self.num_requests}, failed {self.num_failures}, "
            f"{self.num_requests / self.span_s if self.span_s > 0 else 0:.1f} requests/s, "
            f"{rate:.0f} tokens/s over {self.span_s:.1f} s",
            f"{'ms':<6}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
        ]
        for name, values in (("TTFT", self.ttft_ms), ("TPOT", self.tpot_ms)):
            cells = [f"{percentile(values, p):>10.2f}" if values else f"{'-':>10}" for p in RANKS]
            lines.append(f"{name:<6}{''.join(cells)}")
        lines += [f"failure, {count} times: {what}" for what, count in self.failures.items()]
        return "\n".join(lines)


RANKS = (50, 90, 99, 100)


def percentile(ordered: Sequence[float], rank: float) -> float:
    """The nearest-rank percentile of sorted values (at least one)."""
    position = max(1, -(-len(ordered) * rank // 100))
    return ordered[int(position) - 1]


def run_locust(url: str, load: Load) -> Outcome:
    """Put a server under load; raises UserError when Locust itself fails."""
    with tempfile.TemporaryDirectory(prefix="blinkbed-load-") as folder:
        samples = Path(folder) / "samples.json"
        command = [
            *(sys.executable, "-m", "locust", "--locustfile", str(LOCUSTFILE), "--headless"),
            *("--host", url, "--users", str(load.users), "--spawn-rate", str(load.users)),
            *("--run-time", f"{load.seconds}s", "--stop-timeout", f"{STOP_TIMEOUT_S:g}"),
            *("--max-tokens", str(load.max_tokens), "--samples", str(samples)),
            *("--only-summary", "--loglevel", "WARNING", "--exit-code-on-error", "0"),
        ]
        timeout_s = load.seconds + STOP_TIMEOUT_S + STARTUP_TIMEOUT_S
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"Locust did not end within {timeout_s:.0f} s") from None
        if done.returncode != 0 or not samples.exists():
            raise UserError(f"Locust failed with exit status {done.returncode}: {done.stderr}")
        return Outcome.from_samples(json.loads(samples.read_text()))


def main(words: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.run", description=__doc__)
    parser.add_argument("--url", help="load this server instead of starting one")
    parser.add_argument("--model", default="scripted", help="model of the server that is started")
    parser.add_argument("--users", type=int, default=16, help="requests at the same time")
    parser.add_argument("--seconds", type=int, default=20, help="how long to ask")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--max-error-share", type=float, default=0.0, help="gate, 0 to 1")
    parser.add_argument("--max-ttft-p99-ms", type=float, default=2000.0, help="gate")
    options = parser.parse_args(words)
    load = Load(options.users, options.seconds, options.max_tokens)
    gates = Gates(options.max_error_share, options.max_ttft_p99_ms)
    try:
        if options.url:
            outcome = run_locust(options.url, load)
        else:
            with Stack([f"--model={options.model}", "--port=0"], on_message=_relay) as stack:
                outcome = run_locust(stack.wait_ready(READY_TIMEOUT_S).url, load)
    except UserError as error:
        print(f"load test: {error}", file=sys.stderr)
        return 1
    print(outcome.table())
    broken = outcome.broken_gates(gates)
    for sentence in broken:
        print(f"gate broken: {sentence}", file=sys.stderr)
    return 1 if broken else 0


def _relay(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
