"""A stack of containers seen from outside: its containers by role, its front door, its clean-up.

Everything of a stack carries the label ``blinkbed.stack`` with the Compose project's name, and each
container ``blinkbed.role``; that is how the stack is found, whoever started it.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from compose.command import CommandError
from compose.docker import docker
from engine.errors import UserError

STACK_LABEL = "blinkbed.stack"
ROLE_LABEL = "blinkbed.role"
PORT_LABEL = "blinkbed.port"
HTTP_PORT = "8000/tcp"
PROFILES = ("shm", "rxe", "vm", "cuda")
GPU_SIDE = ("rnic", "device", "host")
"""Roles of the GPU's side, in the order in which they start; a link without RNIC has none."""


class StackError(UserError):
    """The stack is not there, or not as it must be."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container as `docker inspect` shows it."""

    name: str
    role: str
    facts: dict[str, Any]

    @property
    def state(self) -> str:
        """created, running, paused, restarting, exited or dead."""
        return str(self.facts["State"]["Status"])

    @property
    def health(self) -> str:
        """starting, healthy or unhealthy; "" without a health check."""
        return str(self.facts["State"].get("Health", {}).get("Status", ""))

    @property
    def networks(self) -> dict[str, dict[str, Any]]:
        """Its endpoints by the network's name."""
        networks: dict[str, dict[str, Any]] = self.facts["NetworkSettings"]["Networks"]
        return networks

    def execute(self, *words: str, what: str, timeout_s: float = 60.0, user: str = "") -> str:
        """Run a program in the container to its end; its output. Raises CommandError."""
        as_user = ("--user", user) if user else ()
        return docker("exec", *as_user, self.name, *words, what=what, timeout_s=timeout_s)


class ContainerStack:
    """The containers of one Compose project; what it says is asked anew each time."""

    def __init__(self, project: str) -> None:
        self.project = project

    def containers(self) -> list[Container]:
        """All of them, running or not."""
        return _containers(f"{STACK_LABEL}={self.project}")

    def container(self, role: str) -> Container:
        """The one with this role; raises StackError."""
        every = self.containers()
        for container in every:
            if container.role == role:
                return container
        if not every:
            running = ", ".join(stacks()) or "none"
            raise StackError(f"there is no stack {self.project!r}; running: {running}")
        raise StackError(f"stack {self.project!r} has no container with the role {role!r}")

    def of_roles(self, roles: Sequence[str]) -> list[Container]:
        """Those with these roles, in the roles' order; a role that is not there is left out."""
        found = {container.role: container for container in self.containers()}
        return [found[role] for role in roles if role in found]

    @property
    def url(self) -> str:
        """Where the SmartNIC's HTTP is reached from here."""
        facts = self.container("smartnic").facts
        ports = facts["NetworkSettings"]["Ports"].get(HTTP_PORT)
        own_port = facts["Config"]["Labels"].get(PORT_LABEL)  # in the host's own network
        if not ports and own_port is None:
            raise StackError(f"the SmartNIC of stack {self.project!r} publishes no port now")
        return f"http://127.0.0.1:{ports[0]['HostPort'] if ports else own_port}"

    def logs(self, num_lines: int = 200) -> dict[str, str]:
        """The end of each container's output, by role."""
        logs = {}
        for container in self.containers():
            words = ("logs", "--tail", str(num_lines), container.name)
            logs[container.role] = docker("container", *words, what="reading logs", both=True)
        return logs


def _containers(*filters: str) -> list[Container]:
    words = [word for entry in filters for word in ("--filter", f"label={entry}")]
    names = docker("ps", "--all", "--quiet", *words, what="listing containers").split()
    if not names:
        return []
    try:
        inspected = json.loads(docker("inspect", *names, what="inspecting containers"))
    except CommandError:  # one of them was removed meanwhile
        return _containers(*filters)
    found = []
    for facts in inspected:
        role = facts["Config"]["Labels"].get(ROLE_LABEL, "")
        found.append(Container(facts["Name"].removeprefix("/"), role, facts))
    return found


def stacks() -> list[str]:
    """Projects that have containers now."""
    return sorted({c.facts["Config"]["Labels"][STACK_LABEL] for c in _containers(STACK_LABEL)})


def sweep(pattern: str) -> list[str]:
    """Remove every container, network and volume of the stacks whose name matches; their names.

    By label, so that what a killed run left behind goes too.
    """
    removed = set()
    for kind, force in (("container", ["--force", "--volumes"]), ("network", []), ("volume", [])):
        form = "{{.ID}}" if kind != "volume" else "{{.Name}}"
        listing = [kind, "ls", "--filter", f"label={STACK_LABEL}"]
        listing += ["--format", form + ' {{.Label "' + STACK_LABEL + '"}}']
        listing += ["--all"] if kind == "container" else []
        for line in docker(*listing, what=f"listing {kind}s").splitlines():
            name, _, project = line.partition(" ")
            if re.fullmatch(pattern, project):
                docker(kind, "rm", *force, name, what=f"removing a {kind}")
                removed.add(project)
    return sorted(removed)


def variables(
    project: str, words: Sequence[str], *, port: int = 0, num_cpus: int | None = None
) -> dict[str, str]:
    """What compose.yaml is filled in with, for one stack.

    words: flags of `blinkbed serve` for every role. With four CPUs or more the host gets its own
    set, so that it can be put under load without touching what stands for hardware.
    """
    cpus = sorted(os.sched_getaffinity(0))[:num_cpus]
    host = cpus[-1:]
    others = cpus[:-1] if len(cpus) >= 4 else cpus
    return {
        "COMPOSE_PROJECT_NAME": project,
        "BLINKBED_FLAGS": " ".join(words),
        "BLINKBED_PORT": str(port),
        "BLINKBED_HOST_CPUS": ",".join(map(str, host)),
        "BLINKBED_DEVICE_CPUS": ",".join(map(str, others)),
        "BLINKBED_SMARTNIC_CPUS": ",".join(map(str, others)),
        "BLINKBED_FABRIC": _free_fabric(project),
    }


def _free_fabric(project: str) -> str:
    """The first three numbers of addresses that no network here has."""
    identities = docker("network", "ls", "--quiet", what="listing networks").split()
    form = "{{range .IPAM.Config}}{{.Subnet}} {{end}}"
    taken = docker("network", "inspect", "--format", form, *identities, what="reading networks")
    start = zlib.crc32(project.encode()) % 256
    for number in range(256):
        prefix = f"10.201.{(start + number) % 256}"
        if f"{prefix}." not in taken:
            return prefix
    raise StackError("all addresses for stacks are taken: remove stacks that nobody needs")
