"""The verbs link between two emulated machines, beside the judges of rdma-core's own perftest.

    python -m loadtests.bench_link

Everything in one pair of machines, one after the other: ib_write_lat and ib_write_bw; a bare
pyverbs WRITE; our record and doorbell as one chain; the whole way to the engine and back. The
engine (scheduler and scripted model) runs on the host and polls the window, as a GPU does, only
with short naps, since the machines need the processor too. Ratios are to the bare WRITE of a
record's size.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from emulation.vm.agent_client import AgentError
from emulation.vm.pair import RNIC, RNIC_ADDRESS, SMARTNIC, EmulatedPair, PairConfig
from engine.config import RingConfig
from loadtests.window_engine import WindowEngine

ROUNDS = 400
STREAM_BYTES = 1 << 16
JUDGE = ("-d", "rxe0", "-x", "1", "-F")
STEP_S = 120.0
WINDOW_BYTES = 24 << 20
MAX_CONTEXT = 16384  # so that 64 KiB fit into a slot
LISTEN_TRIES = 50
IDLE_S = 3e-5


def judge(pair: EmulatedPair, *command: str) -> list[float]:
    """A perftest program in both machines; the numbers of its result line."""
    server = pair.start(RNIC, [command[0], *JUDGE, *command[1:]])
    for _ in range(LISTEN_TRIES):
        try:
            output = pair.run(SMARTNIC, [command[0], *JUDGE, *command[1:], RNIC_ADDRESS])
            break
        except AgentError as error:  # the server does not listen yet
            if "Couldn't connect" not in str(error):
                raise
    else:
        raise AgentError(f"{command[0]} does not listen: {server.output}")
    server.wait(STEP_S)
    lines = output.splitlines()
    header = next(at for at, line in enumerate(lines) if "#bytes" in line)
    return [float(word) for word in lines[header + 1].split()]


def run() -> dict[str, Any]:
    """All figures."""
    size = str(STREAM_BYTES)
    ring = RingConfig(num_slots=64, token_ring_entries=4096)
    with EmulatedPair(PairConfig(window_bytes=WINDOW_BYTES)) as pair:
        latency = judge(pair, "ib_write_lat", "-s", "384", "-n", "1000")
        bandwidth = judge(pair, "ib_write_bw", "-s", size, "-n", "400")
        program = Path(__file__).with_name("link_figures.py").read_bytes()
        pair.machines[SMARTNIC].agent.put("/root/link_figures.py", program)
        with WindowEngine(
            pair.window_path,
            pair.window_offset,
            pair.window_bytes,
            ring,
            max_context=MAX_CONTEXT,
            idle_s=IDLE_S,
        ):
            arguments = ["--window", "/dev/dax0.0", "--listen", RNIC_ADDRESS]
            rnic = pair.start(RNIC, ["python3", "-S", "-m", "engine.link.rnic", *arguments])
            rnic.read_line(STEP_S)
            options = json.dumps({"host": RNIC_ADDRESS, "rounds": ROUNDS})
            output = pair.run(
                SMARTNIC, ["python3", "-S", "/root/link_figures.py", options], timeout_s=STEP_S
            )
        ours = json.loads(output.strip().splitlines()[-1])
        return {
            "accelerator": pair.accelerator,
            "ready_s": pair.ready_after_s,
            "link": ours["description"],
            "record_bytes": ours["record_bytes"],
            **{
                f"{name}_{key}": value
                for name, values in ours.items()
                if isinstance(values, dict)
                for key, value in values.items()
            },
            # ib_write_lat shows half a round trip of two WRITEs (a ping-pong), no acknowledgement.
            "ib_write_lat_typical_us": latency[4],
            "ib_write_bw_mb_s": bandwidth[3] * 1.048576,
            "stream_mb_s": ours["stream_mb_s"],
            "chain_to_bare": ours["chain"]["p50_us"] / ours["bare_record"]["p50_us"],
            "pickup_to_bare": ours["pickup"]["p50_us"] / ours["bare_record"]["p50_us"],
            "stream_to_ib_write_bw": ours["stream_mb_s"] / (bandwidth[3] * 1.048576),
        }


ROWS = (
    ("a WRITE of a record's size, acknowledged: bare pyverbs", "bare_record_p50_us", "us", ""),
    ("record and doorbell as one chain, acknowledged: ours", "chain_p50_us", "us", "chain_to_bare"),
    ("record written, picked up, answer read: ours", "pickup_p50_us", "us", "pickup_to_bare"),
    ("ib_write_lat (half a ping-pong, no acknowledgement)", "ib_write_lat_typical_us", "us", ""),
    ("64 KiB WRITEs: ib_write_bw", "ib_write_bw_mb_s", "MB/s", ""),
    ("64 KiB WRITEs: ours", "stream_mb_s", "MB/s", "stream_to_ib_write_bw"),
)
TARGETS = {"chain_to_bare": "<= 1.5", "pickup_to_bare": "<= 3", "stream_to_ib_write_bw": ">= 0.8"}


def table(figures: dict[str, Any]) -> str:
    """Ours beside rdma-core's own tools, in Markdown."""
    lines = [
        "| figure | measured | ratio to the bare one | target |",
        "| --- | ---: | ---: | --- |",
    ]
    for name, key, unit, ratio in ROWS:
        times = f"{figures[ratio]:.2f}x" if ratio else ""
        lines.append(f"| {name} | {figures[key]:.4g} {unit} | {times} | {TARGETS.get(ratio, '')} |")
    how = "KVM" if figures["accelerator"] == "kvm" else "software emulation (TCG)"
    lines.append(f"\nTwo QEMU guests under {how}, {figures['link']}; all in one run.")
    return "\n".join(lines)


def main() -> int:
    figures = run()
    print(json.dumps(figures))
    print(table(figures), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
