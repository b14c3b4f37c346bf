"""The same events for the scheduler compiled for the host and for the GPU's own, turn by turn.

The GPU's scheduler keeps its own memory. Before each turn it gets what others write there: the
NIC's part of every port, the command, and the model's results. After it, everything but times must
be equal, byte for byte.

As a program (`python -m tests.cuda_turn SEEDS STEPS`) it runs random traces: what the CUDA memory
checker is given.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import RingConfig, SchedulerConfig
from engine.device.cuda import CSRC, load_module
from engine.protocol import C_CONSTANTS, SLOT_STATUS
from engine.state import PLAN, PORT, ROW, SCHEDULER, SEQUENCE, Command
from tests.scheduler_driver import Driver
from tests.scheduler_traces import MAX_CONTEXT, finish, run_random_trace

TURN = Path(CSRC).parent / "device" / "turn.cu"
LISTS = ("running", "waiting", "ended", "suspects")
COUNTERS_WITH_TIMES = ("step_ns", "gap_ns", "idle_ns", "pickup_ns", "records_torn")


def without_times(table: np.ndarray) -> dict[str, Any]:
    """Fields of a struct array, less those that depend on a clock."""
    names = table.dtype.names or ()
    return {n: table[n] for n in names if not n.endswith("_ns") and n != "counters"}


class GpuDriver(Driver):
    """A driver whose every turn is made twice, and compared."""

    __test__ = False
    team_size = 256

    def __init__(self, ring: RingConfig, scheduler: SchedulerConfig) -> None:
        self._gpu: dict[str, Any] | None = None
        super().__init__(ring, scheduler, step=self._both)

    def _mirror(self) -> None:
        import cupy

        self._cupy = cupy
        self._kernel = load_module(TURN).get_function("scheduler_turn")
        host = self.memory.state.copy()
        self._gpu = {"window": cupy.asarray(np.asarray(self.memory.window))}
        for name, array in self.memory.arrays.items():
            self._gpu[name] = cupy.asarray(array.reshape(-1).view(np.uint8))
        for name, array in self._gpu.items():
            host[0][name] = array.data.ptr
        self._gpu["state"] = cupy.asarray(host.view(np.uint8))

    def _both(self, pointer: int) -> None:
        if self._gpu is None:
            self._mirror()
        assert self._gpu is not None
        self._upload(self._gpu)
        self.host.step()
        self._kernel((1,), (self.team_size,), (np.uint64(self._gpu["state"].data.ptr),))
        self._check(self._gpu)

    def _upload(self, gpu: dict[str, Any]) -> None:
        geometry = self.memory.geometry
        for port in range(self.memory.num_ports):
            start = port * geometry.port_bytes
            part = slice(start + C_CONSTANTS["kControlOffset"], start + geometry.status_offset)
            gpu["window"][part].set(np.asarray(self.memory.window[part]))
        for name in ("results", "alternatives", "history"):
            gpu[name].set(self.memory.arrays[name].reshape(-1).view(np.uint8))
        at = SCHEDULER.offset("command")
        gpu["state"][at : at + 4].set(self.memory.word("command").view(np.uint8))

    def _fetch(self, gpu: dict[str, Any], name: str, dtype: Any) -> np.ndarray:
        array: np.ndarray = self._cupy.asnumpy(gpu[name]).view(dtype)
        return array

    def _check(self, gpu: dict[str, Any]) -> None:
        arrays = self.memory.arrays
        own = self._fetch(gpu, "state", SCHEDULER.dtype)[0]
        expected = self.memory.state[0]
        for name in ("state", "error", "num_free_pages", "arrivals", "step", "preempted"):
            assert own[name] == expected[name], name
        plan = self._fetch(gpu, "plan", PLAN.dtype)
        assert plan.tobytes() == arrays["plan"].tobytes()
        rows, count = self._fetch(gpu, "rows", ROW.dtype), int(plan[0]["num_rows"])
        assert rows[:count].tobytes() == arrays["rows"][:count].tobytes()
        for name in (*LISTS, "free_pages"):
            count = int(expected[f"num_{name}"])
            assert own[f"num_{name}"] == count, name
            assert (self._fetch(gpu, name, np.int32)[:count] == arrays[name][:count]).all(), name
        for name, dtype in (("sequences", SEQUENCE.dtype), ("ports", PORT.dtype)):
            wanted = without_times(arrays[name])
            for field, values in without_times(self._fetch(gpu, name, dtype)).items():
                assert (values == wanted[field]).all(), (name, field)
        tables = self._fetch(gpu, "block_tables", np.int32).reshape(arrays["block_tables"].shape)
        for seq in arrays["running"][: expected["num_running"]]:
            held = arrays["sequences"][seq]["num_pages"]
            assert (tables[seq, :held] == arrays["block_tables"][seq, :held]).all()
        self._check_window(self._fetch(gpu, "window", np.uint8))

    def _check_window(self, window: np.ndarray) -> None:
        geometry = self.memory.geometry
        for port in range(self.memory.num_ports):
            start = port * geometry.port_bytes
            own, wanted = (w[start : start + geometry.port_bytes] for w in (window, self._window))
            log = slice(geometry.tokens_offset, None)
            assert own[log].tobytes() == wanted[log].tobytes(), "token ring"
            lines = slice(geometry.status_offset, geometry.tokens_offset)
            expected = without_times(wanted[lines].view(SLOT_STATUS.dtype))
            for name, values in without_times(own[lines].view(SLOT_STATUS.dtype)).items():
                assert (values == expected[name]).all(), name

    @property
    def _window(self) -> np.ndarray:
        return np.asarray(self.memory.window)


def run_trace(seed: int, num_steps: int) -> int:
    """A random configuration and trace; the number of turns that were compared."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 4, 8])
    least = -(-MAX_CONTEXT // page_size)
    chunked = rng.random() < 0.5
    max_running = rng.randint(1, 6)
    scheduler = SchedulerConfig(
        num_pages=least + rng.randint(0, least // 2),
        page_size=page_size,
        max_running=max_running,
        max_step_tokens=rng.randint(max_running if chunked else MAX_CONTEXT, 2 * MAX_CONTEXT),
        max_context=MAX_CONTEXT,
        chunked_prefill=chunked,
        debug=rng.random() < 0.5,
    )
    ring = RingConfig(
        num_slots=rng.choice([2, 4, 8]),
        num_ports=rng.randint(1, 2),
        token_ring_entries=rng.choice([16, 32]),
    )
    driver = GpuDriver(ring, scheduler)
    run_random_trace(driver, rng, num_steps)
    finish(driver, rng.choice(list(Command)))
    return driver.num_steps


def main(num_seeds: int, num_steps: int) -> None:
    turns = sum(run_trace(seed, num_steps) for seed in range(num_seeds))
    print(f"{turns} turns of {num_seeds} random traces: equal on the GPU and on the host")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
