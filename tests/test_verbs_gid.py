"""The choice of a GID, on tables as real ports show them."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from engine.link.verbs_errors import VerbsSetupError
from engine.link.verbs_gid import GidEntry, choose_gid, read_gid_table

V1, V2 = "IB/RoCE v1", "RoCE v2"
LINK_LOCAL = "fe80:0000:0000:0000:5054:00ff:fe00:0001"
GLOBAL_V6 = "2001:0db8:0000:0000:0000:0000:0000:0007"


def mapped(address: str) -> str:
    return ipaddress.IPv6Address(f"::ffff:{address}").exploded


# Soft-RoCE: link-local first, then the interface's IPv4 address.
SOFT_ROCE = [
    GidEntry(0, LINK_LOCAL, V2, "eth0"),
    GidEntry(1, mapped("10.9.0.2"), V2, "eth0"),
]
# A ConnectX port: each address twice, as RoCE v1 and v2.
CONNECTX = [
    GidEntry(0, LINK_LOCAL, V1, "ens1f0"),
    GidEntry(1, LINK_LOCAL, V2, "ens1f0"),
    GidEntry(2, mapped("192.168.7.11"), V1, "ens1f0"),
    GidEntry(3, mapped("192.168.7.11"), V2, "ens1f0"),
    GidEntry(4, GLOBAL_V6, V2, "ens1f0"),
    GidEntry(5, mapped("10.1.0.5"), V2, "ens1f0"),
]
# An interface that got no address from DHCP.
UNCONFIGURED = [
    GidEntry(0, LINK_LOCAL, V2, "eth0"),
    GidEntry(1, mapped("169.254.17.3"), V2, "eth0"),
]


@pytest.mark.parametrize(
    ("table", "near_address", "index"),
    [
        (SOFT_ROCE, "", 1),
        (CONNECTX, "", 3),
        (CONNECTX, "10.1.0.5", 5),
        (CONNECTX, "172.16.0.1", 3),
    ],
)
def test_the_first_routable_ipv4_roce_v2_gid_or_the_handshakes_is_chosen(
    table: list[GidEntry], near_address: str, index: int
) -> None:
    assert choose_gid("dev", table, near_address=near_address).index == index


@pytest.mark.parametrize("table", [UNCONFIGURED, [SOFT_ROCE[0]], []])
def test_a_port_without_one_is_refused_with_the_fix(table: list[GidEntry]) -> None:
    with pytest.raises(VerbsSetupError, match="ip address add"):
        choose_gid("rxe0", table)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (0, r"index 0 of mlx5_0 is fe80::5054:ff:fe00:1, which is IB/RoCE v1"),
        (1, r"index 1 of mlx5_0 is fe80::5054:ff:fe00:1, which is link-local"),
        (2, r"index 2 of mlx5_0 is 192.168.7.11, which is IB/RoCE v1"),
        (9, r"index 9 of mlx5_0 is empty"),
    ],
)
def test_a_forced_index_that_cannot_work_names_address_and_candidate(
    index: int, reason: str
) -> None:
    with pytest.raises(VerbsSetupError, match=reason) as caught:
        choose_gid("mlx5_0", CONNECTX, forced_index=index)
    assert "use index 3 (192.168.7.11)" in str(caught.value)


def test_a_forced_index_that_can_work_is_taken() -> None:
    assert choose_gid("mlx5_0", CONNECTX, forced_index=4).address == "2001:db8::7"


def test_the_table_is_read_as_sysfs_shows_it(tmp_path: Path) -> None:
    port = tmp_path / "rxe0" / "ports" / "1"
    for name in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / name).mkdir(parents=True)
    for entry in SOFT_ROCE:
        (port / "gids" / str(entry.index)).write_text(entry.gid + "\n")
        (port / "gid_attrs/types" / str(entry.index)).write_text(entry.kind + "\n")
        (port / "gid_attrs/ndevs" / str(entry.index)).write_text(entry.netdev + "\n")
    # Empty lines are zero, and their type cannot be read.
    (port / "gids" / "2").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    assert read_gid_table("rxe0", 1, tmp_path) == SOFT_ROCE
