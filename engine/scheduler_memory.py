"""The scheduler's memory on the device, laid out and initialised by the host before the first
launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from engine import protocol, state
from engine.config import RingConfig, SchedulerConfig
from engine.protocol import MAX_LOGPROBS, Geometry

MAX_PICKUPS = 64  # doorbells taken per port and step: bounds the time between two steps
TORN_TIMEOUT_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the scheduler must know of a model."""

    vocab_size: int
    max_context: int  # tokens, as the model and the configuration allow
    eos_ids: tuple[int, ...]


def device_pointer(array: Any) -> int:
    """Address of an array as the device sees it (CuPy's `data.ptr`; NumPy: the host's own)."""
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)


class SchedulerMemory:
    """All arrays of engine/state.py, allocated with `xp` (cupy, its simulator, or numpy).

    window: u8 array of num_ports * geometry.port_bytes, zeroed: the only part that is registered
    for remote access. `state` is the SCHEDULER struct (shape [1]); kernels get its pointer.
    timeline: the scheduler writes down its last steps.
    """

    def __init__(
        self,
        xp: ModuleType,
        window: Any,
        ring: RingConfig,
        scheduler: SchedulerConfig,
        model: ModelLimits,
        epoch: int,
        *,
        timeline: bool = False,
    ) -> None:
        self.geometry = Geometry(
            ring.num_slots, ring.token_ring_entries, model.max_context, model.vocab_size
        )
        self.num_ports = ring.num_ports
        self.num_seqs = ring.num_ports * ring.num_slots
        self.max_pages_per_seq = -(-model.max_context // scheduler.page_size)
        self.window = window
        rows, pages = scheduler.max_running, scheduler.num_pages
        self.arrays: dict[str, Any] = {
            "records": xp.zeros(self.num_seqs * self.geometry.slot_bytes, np.uint8),
            "sequences": xp.zeros(self.num_seqs, state.SEQUENCE.dtype),
            "ports": xp.asarray(self._initial_ports()),
            "history": xp.zeros((self.num_seqs, model.max_context), np.int32),
            "block_tables": xp.zeros((self.num_seqs, self.max_pages_per_seq), np.int32),
            # The top of the stack is its end: page 0 is granted first.
            "free_pages": xp.asarray(np.arange(pages - 1, -1, -1, dtype=np.int32)),
            "running": xp.zeros(rows, np.int32),
            "waiting": xp.zeros(self.num_seqs + 1, np.int32),
            "ended": xp.zeros(self.num_seqs, np.int32),
            "suspects": xp.zeros(self.num_seqs, np.int32),
            "marks": xp.zeros(max(2 * rows, pages), np.int32),
            "plan": xp.zeros(1, state.PLAN.dtype),
            "rows": xp.zeros(rows, state.ROW.dtype),
            "results": xp.zeros(rows, state.RESULT.dtype),
            "alternatives": xp.zeros((rows, MAX_LOGPROBS), state.RESULT.dtype),
        }
        if timeline:
            self.arrays["timeline"] = xp.zeros(state.TIMELINE_STEPS, state.STEP_RECORD.dtype)
        self.state = xp.asarray(self._initial_state(scheduler, model, epoch))
        self._write_identities(model, epoch)

    def _initial_ports(self) -> np.ndarray:
        ports = np.zeros(self.num_ports, state.PORT.dtype)
        ports["next_sequence"] = 1
        return ports

    def _initial_state(
        self, scheduler: SchedulerConfig, model: ModelLimits, epoch: int
    ) -> np.ndarray:
        initial = np.zeros(1, state.SCHEDULER.dtype)
        s = initial[0]
        g = self.geometry
        s["num_ports"], s["slots_per_port"], s["num_seqs"] = (
            self.num_ports,
            g.num_slots,
            self.num_seqs,
        )
        for name in ("num_pages", "page_size", "max_running", "max_step_tokens"):
            s[name] = getattr(scheduler, name)
        s["slot_bits"] = g.num_slots.bit_length() - 1
        s["page_bits"] = scheduler.page_size.bit_length() - 1
        s["chunked_prefill"], s["debug"] = scheduler.chunked_prefill, scheduler.debug
        s["max_context"], s["vocab_size"] = model.max_context, model.vocab_size
        s["max_pages_per_seq"] = self.max_pages_per_seq
        s["num_eos"] = len(model.eos_ids)
        s["eos"][: len(model.eos_ids)] = model.eos_ids
        s["token_ring_entries"], s["max_pickups"] = g.token_ring_entries, MAX_PICKUPS
        s["epoch"], s["torn_timeout_ns"] = epoch, TORN_TIMEOUT_NS
        s["port_bytes"], s["slot_bytes"] = g.port_bytes, g.slot_bytes
        s["cancels_offset"], s["slots_offset"] = g.cancels_offset, g.slots_offset
        s["status_offset"], s["tokens_offset"] = g.status_offset, g.tokens_offset
        s["window"] = device_pointer(self.window)
        for name, array in self.arrays.items():
            s[name] = device_pointer(array)
        s["num_free_pages"] = scheduler.num_pages
        return initial

    def _write_identities(self, model: ModelLimits, epoch: int) -> None:
        size = protocol.IDENTITY.dtype.itemsize
        for port in range(self.num_ports):
            line = np.zeros(size, np.uint8)
            protocol.write_identity(line, self.geometry, port, epoch)
            start = port * self.geometry.port_bytes
            target = self.window[start : start + size]
            if isinstance(target, np.ndarray):
                target[:] = line
            else:
                target.set(line)

    def word(self, name: str) -> Any:
        """View of one field of the scheduler's state, shape [1] (u8 array bytes reinterpreted)."""
        offset = state.SCHEDULER.offset(name)
        members = state.SCHEDULER.dtype.fields
        assert members is not None
        dtype = members[name][0]
        return self.state.view(np.uint8)[offset : offset + dtype.itemsize].view(dtype.base)
