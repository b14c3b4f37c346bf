"""The simulated GPU as a process: ``python -m emulation.cupysim.device --socket PATH``.

It owns the device memory and runs what clients enqueue. It ends by SIGTERM or SIGINT (status 0),
by a client's shutdown request (0), or after a graph failed (70), never because a client left,
unless --exit-with names the client.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

BACKLOG = 16


def total_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def listen(path: Path) -> socket.socket:
    """Listens at `path`, over the remains of a device that was killed; raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if path.exists():
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise OSError(f"a device process listens at {path} already; choose another path")
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(BACKLOG)
    return listener


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m emulation.cupysim.device", description="A simulated GPU as a process."
    )
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket to listen at")
    parser.add_argument(
        "--listen-fd", type=int, help="use this inherited socket, which listens at --socket"
    )
    parser.add_argument(
        "--memory-bytes", type=int, default=total_memory_bytes(), help="device memory (sparse)"
    )
    parser.add_argument("--threads", type=int, help="CPU threads of one kernel's library calls")
    parser.add_argument("--exit-with", type=int, metavar="PID", help="end when this process ends")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    faulthandler.enable()  # a kernel's wild pointer ends in a traceback
    if options.threads is not None:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            os.environ[name] = str(options.threads)  # before torch is imported
    from emulation.cupysim.server import Server

    try:
        if options.listen_fd is not None:
            listener = socket.socket(fileno=options.listen_fd)
        else:
            listener = listen(options.socket)
        server = Server(options.memory_bytes, lambda: options.socket.unlink(missing_ok=True))
    except (OSError, RuntimeError) as error:
        sys.exit(f"cupysim device: {error}")
    signal.signal(signal.SIGTERM, lambda *_: server.end(0))
    if options.exit_with is None:
        signal.signal(signal.SIGINT, lambda *_: server.end(0))
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the client's
        _end_with(options.exit_with, server.end)
    server.serve(listener)


def _end_with(pid: int, end: Callable[[int], object]) -> None:
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        sys.exit("cupysim device: the client was gone before the device started")

    def wait() -> None:
        select.select([watched], [], [])
        end(0)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    main()
