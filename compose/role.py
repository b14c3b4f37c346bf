"""The images' entry point: one role of a stack as the container's only process.

    python -m compose.role {device,host,smartnic} [flags of `blinkbed serve`]
    python -m compose.role rnic [flags of engine.link.rnic]

Every role of a stack gets the flags in the variable BLINKBED_FLAGS, then its own. Where the window
is a file that the RNIC's container made, `{window_offset}` and `{window_bytes}` in them stand for
where it lies in there.
Sockets and configuration lie in BLINKBED_RUNTIME_DIR, a volume of the stack. The process becomes
the role's own program, which therefore gets the container's signals itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from engine.cli import add_serve_flags, config_from
from engine.config import ServeConfig
from engine.errors import UserError

ROLES = ("device", "host", "smartnic")
RNIC = "rnic"
WINDOW, WINDOW_FACTS = "window", "window.json"
"""Files in the runtime folder: the window, and where in it the usable bytes lie."""
WINDOW_BYTES = 32 << 20  # sparse: only what the ring uses is ever backed by memory


def runtime_dir() -> Path:
    """The volume that the containers of one side share."""
    return Path(os.environ.get("BLINKBED_RUNTIME_DIR", "/run/blinkbed"))


def put_window_facts(facts: Mapping[str, Any]) -> None:
    """Say where the window is; for roles that start later. Atomic."""
    path = runtime_dir() / WINDOW_FACTS
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(facts))
    partial.replace(path)


def with_window_facts(words: Sequence[str]) -> list[str]:
    """The words, with what they say of the window filled in."""
    path = runtime_dir() / WINDOW_FACTS
    if not any("{" in word for word in words) or not path.exists():
        return list(words)
    facts = json.loads(path.read_text())
    return [word.format(**facts) for word in words]


def rnic_command(words: Sequence[str]) -> list[str]:
    """The RNIC's program over a new window in a file, for RDMA of the host's own kernel."""
    path = runtime_dir() / WINDOW
    path.unlink(missing_ok=True)
    with path.open("xb") as file:
        file.truncate(WINDOW_BYTES)
    put_window_facts({"window_offset": 0, "window_bytes": WINDOW_BYTES})
    return [sys.executable, "-m", "engine.link.rnic", "--window", str(path), *words]


def command_of(role: str, config: ServeConfig) -> list[str]:
    """The role's program and its arguments, with its configuration written to the volume."""
    python = [sys.executable, "-m"]
    if role == "device":
        device = config.device
        words = ["--socket", str(config.device_socket), "--threads", str(device.num_threads)]
        if device.memory_mib:
            words += ["--memory-bytes", str(device.memory_mib << 20)]
        return [*python, "emulation.cupysim.device", *words]
    if role == "host":
        config.handshake_socket.unlink(missing_ok=True)  # of a host that was killed
    path = config.runtime_path / f"{role}.json"
    path.write_text(config.to_json())
    return [*python, f"engine.{role}", "--config", str(path)]


def config_of_container(words: Sequence[str] = ()) -> ServeConfig:
    """By BLINKBED_FLAGS and these further flags; raises ConfigError."""
    parser = argparse.ArgumentParser(prog="BLINKBED_FLAGS", allow_abbrev=False)
    add_serve_flags(parser)
    flags = shlex.split(os.environ.get("BLINKBED_FLAGS", ""))
    config = config_from(parser.parse_args([*flags, *with_window_facts(words)]))
    reason = os.environ.get("BLINKBED_LINK_REASON", "")
    return config.replace(runtime_dir=str(runtime_dir()), link_reason=reason)


def main() -> NoReturn:
    parser = argparse.ArgumentParser(
        prog="python -m compose.role", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("role", choices=(*ROLES, RNIC))
    arguments, words = parser.parse_known_args()
    try:
        if arguments.role == RNIC:
            command = rnic_command(words)
        else:
            command = command_of(arguments.role, config_of_container(words))
    except (UserError, OSError) as error:
        sys.exit(f"blinkbed: {error}")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
