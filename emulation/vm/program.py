"""The role's program in an emulated machine: how it is started there, and what it says."""

from __future__ import annotations

from collections.abc import Sequence

from emulation.vm.agent_client import GuestProcess
from emulation.vm.machine import Machine
from emulation.vm.pair import RNIC, RNIC_ADDRESS
from engine.config import ServeConfig

PYTHON = ("python3", "-S", "-m")
WINDOW_IN_GUEST = "/dev/dax0.0"
CONFIG_IN_GUEST = "/run/blinkbed.json"
HTTP_PORT = 8000  # in the SmartNIC's guest
READY_MARKS = ("ready:", '"event": "ready"')


def start_program(machine: Machine, config: ServeConfig, words: Sequence[str] = ()) -> GuestProcess:
    """Start the machine's role in it; `words` are further flags of the RNIC's program."""
    if machine.config.role == RNIC:
        arguments = ["--window", WINDOW_IN_GUEST, "--verbs", config.verbs.to_json(), *words]
        return machine.start([*PYTHON, "engine.link.rnic", *arguments])
    inside = config.replace(
        smartnic=config.smartnic.replace(host="0.0.0.0", port=HTTP_PORT),
        rnic=config.rnic.replace(address=config.rnic.address or RNIC_ADDRESS),
        runtime_dir="/run",
    )
    machine.agent.put(CONFIG_IN_GUEST, inside.to_json().encode())
    return machine.start([*PYTHON, "engine.smartnic", "--config", CONFIG_IN_GUEST])


class Listener:
    """What a program says, line by line, as it comes."""

    def __init__(self, program: GuestProcess) -> None:
        self.program = program
        self._shown = 0

    def new_lines(self) -> list[str]:
        """Whole lines since the last call."""
        text = self.program.output[self._shown :]
        whole = text[: text.rfind("\n") + 1]
        self._shown += len(whole)
        return whole.splitlines()


def says_ready(line: str) -> bool:
    """Whether a program's line means that it does its job from now on."""
    return line.startswith(READY_MARKS[0]) or READY_MARKS[1] in line
