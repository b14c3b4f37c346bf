"""The emulated machine inside a container: programs in it and its cable, over `machine.py`'s door.

Every request is one `docker exec`, so that it works from anywhere the stack can be seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compose.docker import docker
from compose.stack import Container, ContainerStack

MACHINE_LABEL = "blinkbed.machine"
CLIENT = ("python", "-m", "compose.machine", "ask")
INTERFACE = "eth0"  # of the guest, which carries RoCE


def is_machine(container: Container) -> bool:
    """Whether the role runs in an emulated machine in this container."""
    return MACHINE_LABEL in container.facts["Config"]["Labels"]


def machines(stack: ContainerStack) -> list[Container]:
    """The running containers that hold a machine: two on the link `vm`, none on others."""
    found = [container for container in stack.containers() if is_machine(container)]
    return [container for container in found if container.state == "running"]


def ask(container: Container, op: str, *, timeout_s: float = 60.0, **arguments: Any) -> Any:
    """What the machine's keeper answers; raises CommandError with its sentence."""
    request = json.dumps({"op": op, "timeout_s": timeout_s, **arguments})
    what = f"asking the {container.role} machine to {op}"
    return json.loads(container.execute(*CLIENT, request, what=what, timeout_s=timeout_s))


def run(container: Container, *argv: str, timeout_s: float = 60.0) -> str:
    """Run a program in the guest to its end; its output."""
    answer = ask(container, "run", argv=argv, timeout_s=timeout_s)
    return str(answer["output"])


def attack(container: Container, name: str, options: str, *, timeout_s: float) -> dict[str, Any]:
    """Run one of emulation/vm/guest/attack.py to its end; the facts that it prints."""
    answer = ask(container, "attack", name=name, options=options, timeout_s=timeout_s)
    facts: dict[str, Any] = json.loads(answer["output"].strip().splitlines()[-1])
    return facts


def set_cable(container: Container, *, plugged: bool) -> None:
    """Pull the cable to the other machine, or plug it in."""
    ask(container, "cable", plugged=plugged)


def signal(container: Container, name: str) -> None:
    """Send a signal to the role's program in the guest."""
    ask(container, "signal", name=name)


def program_state(container: Container) -> str:
    """The state letter of the role's program ("T": stopped)."""
    return str(ask(container, "state")["state"])


def heal(container: Container) -> None:
    """No network emulation, cable plugged in, program going on."""
    ask(container, "heal")


@contextmanager
def capture(container: Container, path: Path) -> Iterator[None]:
    """All packets of the cable during the block, as a pcap at `path` on this side."""
    ask(container, "capture", on=True)
    try:
        yield
    finally:
        inside = ask(container, "capture", on=False)["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        docker("cp", f"{container.name}:{inside}", path, what="fetching the capture")
