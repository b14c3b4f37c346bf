"""Faults of the wire, made with the kernel's network emulator (tc-netem) on an interface.

Each machine impairs what it sends; for both directions apply a fault on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from engine.errors import UserError


@dataclass(frozen=True, slots=True)
class Netem:
    """What happens to packets. Percentages of packets; times in ms.

    reorder_percent: sent at once while the others wait `delay_ms`, which it needs.
    """

    loss_percent: float = 0.0
    duplicate_percent: float = 0.0
    corrupt_percent: float = 0.0
    reorder_percent: float = 0.0
    delay_ms: float = 0.0
    jitter_ms: float = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            limit = 100.0 if field.name.endswith("percent") else 60_000.0
            if not 0 <= value <= limit:
                raise UserError(f"{field.name}={value}: must be between 0 and {limit:g}")
        if self.reorder_percent and not self.delay_ms:
            raise UserError("reordering needs delay_ms: a packet overtakes those that wait")

    def arguments(self) -> list[str]:
        """As words of tc."""
        words: list[str] = []
        if self.delay_ms or self.jitter_ms:
            words += ["delay", f"{self.delay_ms:g}ms"]
            words += [f"{self.jitter_ms:g}ms"] if self.jitter_ms else []
        for name, percent in (
            ("loss", self.loss_percent),
            ("duplicate", self.duplicate_percent),
            ("corrupt", self.corrupt_percent),
            ("reorder", self.reorder_percent),
        ):
            if percent:
                words += [name, f"{percent:g}%"]
        return words

    def command(self, interface: str) -> list[str]:
        """The command that puts the fault on `interface`, in place of an earlier one."""
        return ["tc", "qdisc", "replace", "dev", interface, "root", "netem", *self.arguments()]


TOTAL_LOSS = Netem(loss_percent=100.0)


def clear_command(interface: str) -> list[str]:
    """The command that ends all faults on `interface`: plain queueing, as without any."""
    return ["tc", "qdisc", "replace", "dev", interface, "root", "pfifo_fast"]
