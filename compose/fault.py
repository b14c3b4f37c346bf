"""``blinkbed fault NAME --stack PROJECT``: break a running stack on purpose, and heal it again.

A fault stays until ``blinkbed fault heal --stack PROJECT``, or for ``--seconds``. Healing looks at
what is wrong and puts that right, so it also heals what was broken by hand.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compose import guest
from compose.docker import docker
from compose.stack import GPU_SIDE, Container, ContainerStack, StackError
from emulation.faults import Netem
from emulation.vm.pair import RNIC_ADDRESS
from engine.errors import UserError

HEAL_TIMEOUT_S = 120.0
POLL_S = 0.1
ATTACKED_PORT = 1
ROLES = (*GPU_SIDE, "smartnic")
"""In the order in which they start."""
FABRIC_LABEL = "blinkbed.fabric"  # the network that the link crosses
ADDRESS_LABEL = "blinkbed.fabric-address"


@dataclass(frozen=True, slots=True)
class Options:
    """How bad a fault is."""

    percent: float
    milliseconds: float
    seconds: float = 10.0


DEFAULT = Options(percent=1.0, milliseconds=10.0)
ATTACK_MARGIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to break a stack. `apply` returns when it is broken."""

    help_text: str
    apply: Callable[[ContainerStack, Options], None]


def _kill(roles: Sequence[str]) -> Callable[[ContainerStack, Options], None]:
    def apply(stack: ContainerStack, options: Options) -> None:
        names = [container.name for container in _present(stack, roles)]
        docker("kill", *names, what="killing containers")

    return apply


def _pause(roles: Sequence[str]) -> Callable[[ContainerStack, Options], None]:
    def apply(stack: ContainerStack, options: Options) -> None:
        names = [container.name for container in _present(stack, roles)]
        docker("pause", *names, what="pausing containers")

    return apply


def _present(stack: ContainerStack, roles: Sequence[str]) -> list[Container]:
    found = stack.of_roles(roles)
    if not found:
        stack.container(roles[-1])  # says what is missing
    return [container for container in found if container.state == "running"]


def _freeze(role: str) -> Callable[[ContainerStack, Options], None]:
    def apply(stack: ContainerStack, options: Options) -> None:
        container = stack.container(role)
        if guest.is_machine(container):
            guest.signal(container, "STOP")
        else:  # from outside: a container's first process cannot be stopped from within
            docker("kill", "--signal", "STOP", container.name, what=f"freezing the {role}")
        deadline = time.monotonic() + HEAL_TIMEOUT_S
        while not is_frozen(container):
            if time.monotonic() > deadline:
                raise StackError(f"the {role} process did not stop")
            time.sleep(POLL_S)

    return apply


def is_frozen(container: Container) -> bool:
    """Whether the role's own process stands still (state T)."""
    if guest.is_machine(container):
        return guest.program_state(container) == "T"
    status = container.execute("cat", "/proc/1/stat", what="looking at the process")
    return status.rpartition(")")[2].split()[0] == "T"


def _cut_network(stack: ContainerStack, options: Options) -> None:
    smartnic = stack.container("smartnic")
    network = smartnic.facts["Config"]["Labels"][FABRIC_LABEL]
    docker("network", "disconnect", "--force", network, smartnic.name, what="cutting the network")


def _impair(make: Callable[[Options], Netem]) -> Callable[[ContainerStack, Options], None]:
    def apply(stack: ContainerStack, options: Options) -> None:
        fault = make(options)
        for container in _machines(stack):
            guest.run(container, *fault.command(guest.INTERFACE))

    return apply


def _unplug(stack: ContainerStack, options: Options) -> None:
    for container in _machines(stack):
        guest.set_cable(container, plugged=False)


def _break_queue_pairs(stack: ContainerStack, options: Options) -> None:
    _machines(stack)
    guest.signal(stack.container("rnic"), "USR1")


def _attack(name: str) -> Callable[[ContainerStack, Options], None]:
    def apply(stack: ContainerStack, options: Options) -> None:
        facts = attack(stack, name, seconds=options.seconds)
        print(json.dumps(facts), flush=True)
        if not facts["stood"]:
            raise StackError(f"the engine did not stand {name}: {facts}")

    return apply


def attack(stack: ContainerStack, name: str, *, seconds: float = 10.0) -> dict[str, Any]:
    """Run an attack of emulation/vm/guest/attack.py on port 1; what came of it.

    The SmartNIC keeps port 0, so the stack must have two (`--num-ports 2`).
    """
    _machines(stack)
    container = stack.container("smartnic")
    options = json.dumps({"host": RNIC_ADDRESS, "port": ATTACKED_PORT, "seconds": seconds})
    return guest.attack(container, name, options, timeout_s=seconds + ATTACK_MARGIN_S)


def _machines(stack: ContainerStack) -> list[Container]:
    found = guest.machines(stack)
    if not found:
        stack.container("smartnic")  # says that there is no such stack
        raise StackError(
            f"stack {stack.project!r} has no emulated machines, in which packets can be treated: "
            "this fault needs the profile vm"
        )
    return found


FAULTS = {
    "smartnic-killed": Fault("SIGKILL to the SmartNIC's container", _kill(["smartnic"])),
    "gpu-killed": Fault("SIGKILL to all containers of the GPU's side", _kill(GPU_SIDE)),
    "host-killed": Fault("SIGKILL to the host's container alone", _kill(["host"])),
    "smartnic-paused": Fault("the SmartNIC's container is paused", _pause(["smartnic"])),
    "gpu-paused": Fault("all containers of the GPU's side are paused", _pause(GPU_SIDE)),
    "host-frozen": Fault("SIGSTOP to the host process", _freeze("host")),
    "slow-consumer": Fault(
        "SIGSTOP to the SmartNIC process: nobody reads the token ring", _freeze("smartnic")
    ),
    "network-cut": Fault("the SmartNIC's container leaves the link's network", _cut_network),
    "loss": Fault(
        "--percent of the link's packets are lost",
        _impair(lambda options: Netem(loss_percent=options.percent)),
    ),
    "delay": Fault(
        "the link's packets are late by --milliseconds",
        _impair(lambda options: Netem(delay_ms=options.milliseconds)),
    ),
    "duplication": Fault(
        "--percent of the packets come twice",
        _impair(lambda options: Netem(duplicate_percent=options.percent)),
    ),
    "reordering": Fault(
        "--percent of the packets overtake others, which are late by --milliseconds",
        _impair(
            lambda options: Netem(reorder_percent=options.percent, delay_ms=options.milliseconds)
        ),
    ),
    "corruption": Fault(
        "a bit is wrong in --percent of the packets",
        _impair(lambda options: Netem(corrupt_percent=options.percent)),
    ),
    "qp-error": Fault("the RNIC's queue pairs go into the state ERR, for good", _break_queue_pairs),
    "stale-rkey": Fault(
        "a WRITE with the key of an earlier session, on port 1: refused", _attack("stale-rkey")
    ),
    "outside": Fault("WRITEs just outside port 1: refused", _attack("outside")),
    "stale-epoch": Fault(
        "a record of an earlier start of the engine, on port 1: refused", _attack("stale-epoch")
    ),
    "ring-torture": Fault(
        "for --seconds, records on port 1 whose doorbells come before their payload: none is "
        "executed torn",
        _attack("ring-torture"),
    ),
    "link-down": Fault("the cable between the machines is unplugged", _unplug),
}


ATTACKS = ("stale-rkey", "outside", "stale-epoch", "ring-torture")
"""They are over when the command is, and leave nothing to heal."""


def heal(stack: ContainerStack, *, timeout_s: float = HEAL_TIMEOUT_S) -> None:
    """Undo every fault and wait until each container is healthy; raises StackError if not."""
    if not stack.containers():
        stack.container("smartnic")  # says that there is no such stack
    for container in stack.containers():
        if container.state == "paused":
            docker("unpause", container.name, what="unpausing")
        elif container.state == "running":
            docker("kill", "--signal", "CONT", container.name, what="letting a process go on")
        _reconnect(container)
    for container in guest.machines(stack):
        guest.heal(container)
    _restart_dead(stack, timeout_s)


def _reconnect(container: Container) -> None:
    labels = container.facts["Config"]["Labels"]
    network, address = labels.get(FABRIC_LABEL), labels.get(ADDRESS_LABEL)
    if network and network not in container.networks:
        where = ("--ip", address) if address else ()
        names = ("--alias", container.role)
        docker("network", "connect", *where, *names, network, container.name, what="connecting")


def _restart_dead(stack: ContainerStack, timeout_s: float) -> None:
    """Start what is not running, in order.

    Device, host and RNIC hold parts of one engine, so they start anew together. A SmartNIC over
    RDMA finds a new engine by itself; over shared memory it holds the old window.
    """
    deadline = time.monotonic() + timeout_s
    gpu_side = stack.of_roles(GPU_SIDE)
    needs_new_engine = any(container.state != "running" for container in gpu_side)
    for container in stack.of_roles(ROLES):
        holds_engine = container.role in GPU_SIDE or not guest.is_machine(container)
        if container.state != "running" or (needs_new_engine and holds_engine):
            docker("restart", container.name, what=f"starting the {container.role} container")
        _wait_healthy(stack, container.role, deadline)


def _wait_healthy(stack: ContainerStack, role: str, deadline: float) -> None:
    while True:
        container = stack.container(role)
        if container.state == "running" and container.health in ("healthy", ""):
            return
        if container.state in ("exited", "dead") or time.monotonic() > deadline:
            words = container.health or container.state
            raise StackError(f"the {role} container of {stack.project} did not recover: {words}")
        time.sleep(POLL_S)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    names = "\n".join(f"  {name:16} {fault.help_text}" for name, fault in FAULTS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"faults:\n{names}\n  {'heal':16} undo all of them and wait until it serves"
    parser.add_argument("name", choices=[*FAULTS, "heal"], metavar="NAME", help="see below")
    parser.add_argument("--stack", required=True, metavar="PROJECT", help="the Compose project")
    help_text = "heal after so long (default: never); how long ring-torture lasts"
    parser.add_argument("--seconds", type=float, help=help_text)
    for name, default in (("percent", DEFAULT.percent), ("milliseconds", DEFAULT.milliseconds)):
        help_text = f"of the faults that say so (default: {default:g})"
        parser.add_argument(f"--{name}", type=float, default=default, help=help_text)


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out; raises UserError."""
    stack = ContainerStack(arguments.stack)
    if arguments.name == "heal":
        heal(stack)
        return 0
    seconds = DEFAULT.seconds if arguments.seconds is None else arguments.seconds
    options = Options(arguments.percent, arguments.milliseconds, seconds)
    FAULTS[arguments.name].apply(stack, options)
    if arguments.name in ATTACKS:
        print(f"{arguments.name}: stack {stack.project} stood it", flush=True)
        return 0
    print(f"{arguments.name}: stack {stack.project} is broken", flush=True)
    if arguments.seconds is not None:
        time.sleep(arguments.seconds)
        heal(stack)
        print(f"stack {stack.project} is whole again", flush=True)
    return 0


def main(words: Sequence[str] | None = None) -> int:
    """``python -m compose.fault``."""
    parser = argparse.ArgumentParser(prog="blinkbed fault", description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(words))
    except UserError as error:
        parser.exit(1, f"blinkbed: {error}\n")


if __name__ == "__main__":
    main()
