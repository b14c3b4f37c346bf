"""Soft-RoCE of the host's own kernel: an rxe link on a network interface, made and removed.

Both are idempotent: a link that is there already (a udev rule may have made it) is used as it is,
and only a link that was made here is removed.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from engine.errors import UserError
from engine.link.verbs_gid import SYSFS, choose_gid, read_gid_table

MODULE = "rdma_rxe"
READY_TIMEOUT_S = 10.0  # a new link is ready after about 1 s
COMMAND_TIMEOUT_S = 30.0

Runner = Callable[[Sequence[str]], str]
"""Runs a command and returns its output; raises UserError when it fails."""


def run_command(command: Sequence[str]) -> str:
    """The Runner that really runs commands."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        package = {"rdma": "iproute2", "ip": "iproute2", "modprobe": "kmod"}.get(command[0])
        raise UserError(
            f"{command[0]} is missing; install it (Debian: apt-get install {package})"
        ) from None
    except subprocess.TimeoutExpired:
        raise UserError(f"'{' '.join(command)}' took longer than {COMMAND_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip() or f"status {done.returncode}"
        raise UserError(f"'{' '.join(command)}' failed: {reason}")
    return done.stdout


@dataclass(frozen=True, slots=True)
class RdmaLink:
    """A port of an RDMA device, as `rdma link` shows it."""

    name: str
    port: int
    state: str
    netdev: str


def parse_links(text: str) -> list[RdmaLink]:
    """The output of `rdma -j link show`; ports without a network interface have netdev ""."""
    return [
        RdmaLink(one["ifname"], one["port"], one.get("state", ""), one.get("netdev", ""))
        for one in json.loads(text or "[]")
        if "ifname" in one
    ]


def default_netdev(run: Runner) -> str:
    """The interface with the default route; UserError if there is none."""
    for route in json.loads(run(["ip", "-j", "route", "show", "default"]) or "[]"):
        if "dev" in route:
            return str(route["dev"])
    raise UserError("no network interface has a default route; name one for Soft-RoCE")


class RxeLink:
    """A Soft-RoCE link on `netdev` (default: the interface with the default route).

    A context manager: set up, and torn down if it was made here. Raises UserError with the fix.
    """

    def __init__(
        self,
        netdev: str = "",
        *,
        name: str = "rxe0",
        run: Runner = run_command,
        sysfs: Path = SYSFS,
        modules: Path = Path("/sys/module"),
    ) -> None:
        self.netdev, self.name = netdev, name
        self.was_made_here = False
        self._run, self._sysfs, self._modules = run, sysfs, modules

    def set_up(self) -> None:
        """Make the link unless it is there, and wait until it is active with an IPv4 GID."""
        self._load_module()
        self.netdev = self.netdev or default_netdev(self._run)
        link = self._find()
        if link is None:
            self._run(["rdma", "link", "add", self.name, "type", "rxe", "netdev", self.netdev])
            self.was_made_here = True
        else:
            self.name = link.name
        try:
            self._wait_ready()
        except BaseException:
            self.tear_down()
            raise

    def _load_module(self) -> None:
        if (self._modules / MODULE).exists():
            return
        try:
            self._run(["modprobe", MODULE])
        except UserError as error:
            raise UserError(
                f"this kernel has no Soft-RoCE ({error}); install the full kernel package "
                "(Debian: linux-image-amd64; Ubuntu: linux-modules-extra-$(uname -r)), or use "
                "emulated machines (--link vm)"
            ) from error

    def _find(self) -> RdmaLink | None:
        links = parse_links(self._run(["rdma", "-j", "link", "show"]))
        return next((link for link in links if link.netdev == self.netdev), None)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while True:
            link = self._find()
            if link is not None and link.state == "ACTIVE":
                try:
                    choose_gid(link.name, read_gid_table(link.name, link.port, self._sysfs))
                    return
                except UserError:
                    if time.monotonic() > deadline:
                        raise
            if time.monotonic() > deadline:
                state = link.state if link is not None else "gone"
                raise UserError(
                    f"the Soft-RoCE link {self.name} on {self.netdev} is {state} after "
                    f"{READY_TIMEOUT_S:g} s; bring the interface up (ip link set {self.netdev} up)"
                )
            time.sleep(0.05)

    def tear_down(self) -> None:
        """Remove the link if it was made here; idempotent."""
        if self.was_made_here:
            self.was_made_here = False
            if self._find() is not None:
                self._run(["rdma", "link", "delete", self.name])

    def __enter__(self) -> Self:
        self.set_up()
        return self

    def __exit__(self, *exc: object) -> None:
        self.tear_down()
