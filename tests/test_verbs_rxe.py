"""Soft-RoCE of the host's kernel: which commands are run, on outputs recorded from a machine that
has it. What the commands do cannot be tried where the kernel has no rdma_rxe.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from emulation.rxe import RdmaLink, RxeLink, parse_links
from engine.errors import UserError

LINKS = (
    '[{"ifindex":0,"ifname":"rxe0","port":1,"state":"ACTIVE","physical_state":"LINK_UP",'
    '"netdev":"eth0","netdev_index":2}]'
)
ROUTES = '[{"dst":"default","gateway":"10.0.2.2","dev":"eth0","flags":[]}]'
SHOW = ("rdma", "-j", "link", "show")
ADD = ("rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "eth0")
DELETE = ("rdma", "link", "delete", "rxe0")


class Host:
    """A host that answers as the recorded one did; `has_link` follows add and delete."""

    def __init__(self, sysfs: Path, *, has_link: bool, has_module: bool = True) -> None:
        self.has_link, self.has_module = has_link, has_module
        self.commands: list[tuple[str, ...]] = []
        port = sysfs / "rxe0" / "ports" / "1"
        for name, text in (
            ("gids/0", "fe80:0000:0000:0000:5054:00ff:fe00:0001"),
            ("gids/1", "0000:0000:0000:0000:0000:ffff:0a09:0001"),
            ("gid_attrs/types/0", "RoCE v2"),
            ("gid_attrs/types/1", "RoCE v2"),
        ):
            (port / name).parent.mkdir(parents=True, exist_ok=True)
            (port / name).write_text(text)

    def run(self, command: Sequence[str]) -> str:
        words = tuple(command)
        self.commands.append(words)
        if words[0] == "modprobe" and not self.has_module:
            raise UserError("modprobe: FATAL: Module rdma_rxe not found")
        if words == ADD:
            self.has_link = True
        if words == DELETE:
            self.has_link = False
        if words == SHOW:
            return LINKS if self.has_link else "[]"
        return ROUTES if words[0] == "ip" else ""


def make_link(host: Host, tmp_path: Path) -> RxeLink:
    return RxeLink(run=host.run, sysfs=tmp_path, modules=tmp_path / "none")


def test_links_are_parsed_as_recorded() -> None:
    assert parse_links(LINKS) == [RdmaLink("rxe0", 1, "ACTIVE", "eth0")]
    assert parse_links("") == []


def test_a_link_is_made_on_the_default_interface_and_removed(tmp_path: Path) -> None:
    host = Host(tmp_path, has_link=False)
    with make_link(host, tmp_path) as link:
        assert link.netdev == "eth0"
        assert DELETE not in host.commands
    assert host.commands.count(ADD) == host.commands.count(DELETE) == 1
    assert host.commands[0] == ("modprobe", "rdma_rxe")


def test_a_link_that_was_there_is_used_and_left(tmp_path: Path) -> None:
    host = Host(tmp_path, has_link=True)
    with make_link(host, tmp_path) as link:
        link.set_up()
    assert ADD not in host.commands
    assert DELETE not in host.commands
    assert host.has_link


def test_tearing_down_twice_removes_once(tmp_path: Path) -> None:
    host = Host(tmp_path, has_link=False)
    link = make_link(host, tmp_path)
    link.set_up()
    link.tear_down()
    link.tear_down()
    assert host.commands.count(DELETE) == 1


def test_a_kernel_without_the_module_is_told_what_to_do(tmp_path: Path) -> None:
    host = Host(tmp_path, has_link=False, has_module=False)
    with pytest.raises(UserError, match=r"linux-image-amd64.*--link vm"):
        make_link(host, tmp_path).set_up()
    assert ADD not in host.commands
