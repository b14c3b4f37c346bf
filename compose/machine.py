"""The keeper of one emulated machine: the first process of a container on the link `vm`.

    python -m compose.machine keep {rnic,smartnic} [flags]   boot it, run the role's program
    python -m compose.machine ask JSON                       ask the keeper, from `docker exec`

The two machines' cable is UDP between the containers, over the stack's own network: whatever
becomes of that network becomes of the cable.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compose.role import WINDOW, config_of_container, put_window_facts, runtime_dir
from emulation.capture import Capture
from emulation.faults import clear_command
from emulation.vm.agent_client import AgentError, GuestProcess
from emulation.vm.image import Image
from emulation.vm.machine import Machine, MachineConfig, Window
from emulation.vm.pair import (
    MACS,
    PREFIX_LENGTH,
    RNIC,
    RNIC_ADDRESS,
    SMARTNIC_ADDRESS,
    window_file_bytes,
)
from emulation.vm.program import HTTP_PORT, Listener, says_ready, start_program
from engine.errors import UserError

GUEST = Path("/srv/guest")
DOOR = Path("/tmp/machine.sock")
READY = Path("/tmp/machine.ready")
CAPTURE_FILE = Path("/tmp/cable.pcap")
CABLE_PORT = 7000  # UDP
ATTACK = ("python3", "-S", "/opt/blinkbed/attack.py")
INTERFACE = "eth0"  # of the guest, which carries RoCE
STOP_TIMEOUT_S = 40.0
BOOT_TRIES = 3
RESTART_DELAYS_S = (0.1, 0.5, 1.0, 2.0, 5.0)
STABLE_AFTER_S = 30.0
POLL_S = 0.05


def machine_config(role: str) -> MachineConfig:
    """By the container's environment: peer's address, accelerator, CPUs, memory."""
    is_rnic = role == RNIC
    peer = os.environ["BLINKBED_PEER"]
    cable = (
        f"local.type=inet,local.host=0.0.0.0,local.port={CABLE_PORT},"
        f"remote.type=inet,remote.host={peer},remote.port={CABLE_PORT}"
    )
    return MachineConfig(
        role=role,
        address=f"{RNIC_ADDRESS if is_rnic else SMARTNIC_ADDRESS}/{PREFIX_LENGTH}",
        mac=MACS[role],
        cable=cable,
        accelerator=os.environ.get("BLINKBED_ACCELERATOR", "tcg"),
        num_cpus=1 if is_rnic else int(os.environ.get("BLINKBED_MACHINE_CPUS", "1")),
        memory_mib=int(os.environ.get("BLINKBED_MACHINE_MEMORY_MIB", "1024")),
        window=_make_window() if is_rnic else None,
        forwards=() if is_rnic else (("0.0.0.0", HTTP_PORT, HTTP_PORT),),
    )


def _make_window() -> Window:
    """A new file for the window, whatever an earlier machine left."""
    path = runtime_dir() / WINDOW
    path.unlink(missing_ok=True)
    num_bytes = window_file_bytes(int(os.environ.get("BLINKBED_WINDOW_MIB", "24")) << 20)
    with path.open("xb") as file:
        file.truncate(num_bytes)
    return Window(path, num_bytes)


class Keeper:
    """The machine, the role's program in it, and the door for questions."""

    def __init__(self, role: str, words: Sequence[str]) -> None:
        self.role = role
        self._words = words
        self.machine = _boot(role)
        self.program: GuestProcess | None = None
        self._capture: Capture | None = None
        self._stopping = threading.Event()

    def run(self) -> int:
        """Until SIGTERM; the exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stopping.set())
        facts = self.machine.agent.facts()
        _say(f"the machine {self.role} is ready: {json.dumps(facts)}")
        if self.role == RNIC:
            put_window_facts(facts)
        threading.Thread(target=self._answer_all, daemon=True).start()
        num_starts = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            self._run_program()
            if self._stopping.is_set():
                break
            num_starts = 0 if time.monotonic() - started > STABLE_AFTER_S else num_starts + 1
            delay_s = RESTART_DELAYS_S[min(num_starts, len(RESTART_DELAYS_S) - 1)]
            _say(f"the program ended; starting it again in {delay_s:g} s")
            self._stopping.wait(delay_s)
        self.machine.close()
        return 0

    def _run_program(self) -> None:
        """Start the role's program, pass on what it says, until it ends or SIGTERM."""
        program = self.program = self._start_program()
        deadline = None
        listener = Listener(program)
        while program.status is None:
            if self._stopping.is_set() and deadline is None:
                deadline = time.monotonic() + STOP_TIMEOUT_S
                program.signal(signal.SIGCONT)
                program.signal(signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline:
                return
            time.sleep(POLL_S)
            self._show(listener)
            if self.machine.process.poll() is not None:
                raise UserError(f"the machine has ended: {self.machine.log_tail()}")
        self._show(listener)
        READY.unlink(missing_ok=True)

    def _show(self, listener: Listener) -> None:
        for line in listener.new_lines():
            _say(line)
            if says_ready(line):
                READY.touch()

    def _start_program(self) -> GuestProcess:
        if self.role == RNIC:
            return start_program(self.machine, config_of_container(), self._words)
        return start_program(self.machine, config_of_container(self._words))

    # ---- the door

    def _answer_all(self) -> None:
        DOOR.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(DOOR))
            listener.listen()
            while True:
                peer, _ = listener.accept()
                threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer, peer.makefile("r") as questions:
            try:
                answer = self._act(json.loads(questions.readline()))
            except (AgentError, UserError, OSError, ValueError, KeyError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            peer.sendall(json.dumps(answer).encode())

    def _act(self, question: dict[str, Any]) -> dict[str, Any]:
        actions: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "run": self._do_run,
            "attack": self._do_attack,
            "cable": self._do_cable,
            "signal": self._do_signal,
            "heal": self._do_heal,
            "capture": self._do_capture,
            "state": self._do_state,
            "facts": lambda _: self.machine.agent.facts(),
        }
        return actions[question["op"]](question)

    def _do_run(self, question: dict[str, Any]) -> dict[str, Any]:
        timeout_s = float(question.get("timeout_s", 60.0))
        return {"output": self.machine.run(question["argv"], timeout_s=timeout_s)}

    def _do_attack(self, question: dict[str, Any]) -> dict[str, Any]:
        process = self.machine.start([*ATTACK, question["name"], question["options"]])
        process.wait(float(question["timeout_s"]))
        return {"output": process.output}

    def _do_cable(self, question: dict[str, Any]) -> dict[str, Any]:
        self.machine.set_cable(bool(question["plugged"]))
        return {}

    def _do_signal(self, question: dict[str, Any]) -> dict[str, Any]:
        if self.program is not None:
            self.program.signal(signal.Signals[f"SIG{question['name']}"])
        return {}

    def _do_state(self, question: dict[str, Any]) -> dict[str, Any]:
        """The state letter of the role's program, as /proc in the guest shows it."""
        if self.program is None:
            return {"state": ""}
        status = self.machine.run(["cat", f"/proc/{self.program.pid}/stat"])
        return {"state": status.rpartition(")")[2].split()[0]}

    def _do_capture(self, question: dict[str, Any]) -> dict[str, Any]:
        """Begin to write what crosses the cable to CAPTURE_FILE, or end that."""
        if self._capture is not None:
            self._capture.__exit__(None, None, None)
            self._capture = None
        if question["on"]:
            CAPTURE_FILE.unlink(missing_ok=True)
            self._capture = Capture(self.machine, CAPTURE_FILE).__enter__()
        return {"path": str(CAPTURE_FILE)}

    def _do_heal(self, question: dict[str, Any]) -> dict[str, Any]:
        self.machine.set_cable(True)
        self.machine.run(clear_command(INTERFACE))
        return self._do_signal({"name": "CONT"})


def _boot(role: str) -> Machine:
    """A machine that is ready; one that does not come up (a busy host) is tried again."""
    config = machine_config(role)
    image = Image(GUEST / "vmlinux", GUEST / "initramfs", GUEST / "packages.ext4")
    for tries_left in reversed(range(BOOT_TRIES)):
        machine = Machine(config, image, Path("/tmp/machine"))
        try:
            machine.wait_ready()
        except UserError as error:
            machine.close()
            if not tries_left:
                raise
            _say(f"trying again: {error}")
        else:
            return machine
    raise AssertionError("there is at least one try")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def ask(question: str) -> int:
    """Send a question to the container's keeper and print the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(DOOR))
        sock.sendall(question.encode() + b"\n")
        with sock.makefile("r") as answers:
            answer = json.loads(answers.read())
    if "error" in answer:
        _say(answer["error"])
        return 1
    print(json.dumps(answer))
    return 0


def main(words: list[str]) -> int:
    if words[:1] == ["ask"]:
        return ask(words[1])
    if words[:1] == ["keep"]:
        READY.unlink(missing_ok=True)
        try:
            return Keeper(words[1], words[2:]).run()
        except (UserError, AgentError) as error:
            _say(f"blinkbed: {error}")
            return 1
    _say("usage: python -m compose.machine keep ROLE [FLAGS] | ask JSON")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
