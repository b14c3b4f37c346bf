"""The summary of an end-to-end run: what was real, what was found, in a screenful."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

EMULATED_LINK = {
    "shm": "emulated: shared memory between the containers, no NIC",
    "vm": "real RoCEv2 (rdma_rxe, RC queue pairs) between two emulated machines",
    "rxe": "real RoCEv2 (rdma_rxe, RC queue pairs) of this host's kernel",
    "cuda": "emulated: shared memory between the containers, no NIC",
}
EMULATED_GPU = {"sim": "emulated: a device process computing on the CPU", "cuda": "real"}


def parts(report: dict[str, Any]) -> dict[str, str]:
    """Each part, and whether it was real."""
    device = str(report["server"].get("device", "sim"))
    return {
        "link": EMULATED_LINK[report["link"]],
        "GPU": EMULATED_GPU[device],
        "SmartNIC": "emulated: "
        + ("a machine of its own" if report["link"] == "vm" else "a container of its own"),
        "HTTP, ring, scheduler, model": "real",
    }


def lines(report: dict[str, Any]) -> Iterator[str]:
    """The summary, line by line."""
    yield f"link       {report['link']} ({report['reason']})"
    yield f"machine    {report['machine']}, {report['started_at']}"
    for part, how in parts(report).items():
        yield f"  {part:30} {how}"
    outcomes = Counter(report["tests"].values())
    yield "tests      " + ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    for name, outcome in report["tests"].items():
        if outcome == "failed":
            yield f"  FAILED {name}"
    yield from _table("figures", report["figures"], "{:10.1f}")
    yield from _table("recovery after a fault, s", report["recovery_s"], "{:10.2f}")
    yield from _table("RDMA counters", report["counters"], "{:10.0f}")


def _table(title: str, values: dict[str, float], form: str) -> Iterator[str]:
    yield title if values else f"{title}: none"
    for name, value in values.items():
        yield f"  {name:36} {form.format(value)}"
