"""``python -m emulation.vm.child ROLE``: one emulated machine as a child process of the launcher.

Boots the machine, runs the role's program in it, and passes on what it says. SIGTERM goes to the
program, and the machine ends with it; a program that ends takes the machine along, and the
launcher starts both anew. The window's file outlives the RNIC's machine: the launcher removes it.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from emulation.vm.accelerator import usable_accelerator
from emulation.vm.agent_client import GuestProcess
from emulation.vm.image import build_image
from emulation.vm.machine import Machine, MachineConfig, Window
from emulation.vm.pair import (
    MACS,
    PREFIX_LENGTH,
    RNIC,
    RNIC_ADDRESS,
    SMARTNIC,
    SMARTNIC_ADDRESS,
)
from emulation.vm.program import HTTP_PORT, Listener, says_ready, start_program
from engine import progress
from engine.config import ServeConfig
from engine.errors import UserError

MEMORY_MIB = {RNIC: 768, SMARTNIC: 1024}
STOP_MARGIN_S = 10.0
POLL_S = 0.05


class MachineChild:
    """One role's machine. A context manager."""

    def __init__(self, role: str, config: ServeConfig) -> None:
        self.role, self.config = role, config
        self.folder = config.runtime_path / role
        shutil.rmtree(self.folder, ignore_errors=True)
        (config.runtime_path / f"{role}.cable").unlink(missing_ok=True)
        self._stopping = threading.Event()
        progress.progress("preparing the emulated machine, with a download at the first start")
        image = build_image()
        accelerator = usable_accelerator("auto", image)
        how = "KVM" if accelerator == "kvm" else "software emulation (TCG)"
        progress.progress(f"booting the {role}'s machine under {how}")
        self.machine = Machine(self._machine_config(accelerator), image, self.folder)

    def _machine_config(self, accelerator: str) -> MachineConfig:
        runtime, role = self.config.runtime_path, self.role
        peer = SMARTNIC if role == RNIC else RNIC
        smartnic = self.config.smartnic
        return MachineConfig(
            role=role,
            address=f"{RNIC_ADDRESS if role == RNIC else SMARTNIC_ADDRESS}/{PREFIX_LENGTH}",
            mac=MACS[role],
            cable=f"local.type=unix,local.path={runtime / role}.cable,"
            f"remote.type=unix,remote.path={runtime / peer}.cable",
            accelerator=accelerator,
            memory_mib=MEMORY_MIB[role],
            window=self._window() if role == RNIC else None,
            forwards=() if role == RNIC else ((smartnic.host, smartnic.port, HTTP_PORT),),
        )

    def _window(self) -> Window:
        path = Path(self.config.window.file)
        return Window(path, path.stat().st_size)

    def run(self) -> int:
        """Until SIGTERM or the program's end; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stopping.set())
        facts = self.machine.wait_ready()
        program = start_program(self.machine, self.config)
        listener = Listener(program)
        deadline = float("inf")
        is_ready = False
        while program.status is None and time.monotonic() < deadline:
            if self._stopping.is_set() and deadline == float("inf"):
                deadline = time.monotonic() + self.config.smartnic.drain_timeout_s + STOP_MARGIN_S
                _ask_to_stop(program)
            for line in listener.new_lines():
                if not is_ready and says_ready(line):
                    is_ready = True
                    self._say_ready(facts)
                else:
                    print(line, file=sys.stderr, flush=True)
            if self.machine.process.poll() is not None:
                raise UserError(f"the {self.role}'s machine has ended: {self.machine.log_tail()}")
            time.sleep(POLL_S)
        if self._stopping.is_set():
            return 0
        words = program.output.strip().splitlines()[-1:] or ["no message"]
        raise UserError(f"in the {self.role}'s machine: {words[0].removeprefix('error: ')}")

    def _say_ready(self, facts: dict[str, object]) -> None:
        window = self.machine.config.window
        where = {}
        if window is not None:
            where = {
                "window_offset": int(str(facts["window_offset"])),
                "window_bytes": int(str(facts["window_bytes"])),
            }
        what = "the RNIC answers" if self.role == RNIC else "serving"
        uptime_s = float(str(facts["uptime_s"]))
        progress.ready(f"{what}, in a machine that took {uptime_s:.1f} s to boot", **where)

    def close(self) -> None:
        """End the machine."""
        self.machine.close()

    def __enter__(self) -> MachineChild:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _ask_to_stop(program: GuestProcess) -> None:
    program.signal(signal.SIGCONT)
    program.signal(signal.SIGTERM)


def _run(role: str, config: ServeConfig) -> int:
    with MachineChild(role, config) as child:
        return child.run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m emulation.vm.child", description=__doc__)
    parser.add_argument("role", choices=(RNIC, SMARTNIC))
    parser.add_argument("--config", type=Path, required=True, help="ServeConfig as a JSON file")
    arguments = parser.parse_args()
    config = ServeConfig.from_json(arguments.config.read_text())
    return progress.run_child(lambda: _run(arguments.role, config), debug=config.debug)


if __name__ == "__main__":
    sys.exit(main())
