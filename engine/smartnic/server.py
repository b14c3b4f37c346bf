"""The HTTP server's life: uvicorn on a socket, ready, draining, ended."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator

import uvicorn

from engine.smartnic.app import App
from engine.smartnic.engine import Engine
from engine.smartnic.errors import draining
from engine.smartnic.http_protocol import BoundedHttpProtocol
from engine.smartnic.served_model import ServedModel

KEEP_ALIVE_S = 75
BACKLOG = 2048
POLL_S = 0.02
LAST_BYTES_S = 2  # for responses that are complete but not sent
SWITCH_INTERVAL_S = 0.001  # how long the token poller may wait for the interpreter's lock


class _Uvicorn(uvicorn.Server):
    """Uvicorn without its signal handlers: it would stop listening before the drain is over."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    listener: socket.socket,
    engine: Engine,
    model: ServedModel,
    *,
    drain_timeout_s: float,
    on_ready: Callable[[], None],
) -> None:
    """Serve until SIGTERM or SIGINT, then until the running requests ended or the time is over.

    A second signal ends the drain at once. on_ready: called when requests are taken.
    """
    config = uvicorn.Config(
        App(engine, model),
        http=BoundedHttpProtocol,
        loop="uvloop",
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=LAST_BYTES_S,
        backlog=BACKLOG,
    )
    server = _Uvicorn(config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    factory = config.get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(_run(server, listener, engine, drain_timeout_s, on_ready))


async def _run(
    server: _Uvicorn,
    listener: socket.socket,
    engine: Engine,
    drain_timeout_s: float,
    on_ready: Callable[[], None],
) -> None:
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    engine.start()
    try:
        serving = loop.create_task(server.serve(sockets=[listener]))
        stopping = loop.create_task(_stop_on_signal(server, engine, signals, drain_timeout_s))
        while not server.started and not serving.done():
            await asyncio.sleep(POLL_S)
        gc.collect()
        gc.freeze()  # what is loaded stays: the collector need not look at it again
        on_ready()
        await serving
        stopping.cancel()
    finally:
        engine.close()


async def _stop_on_signal(
    server: _Uvicorn, engine: Engine, signals: asyncio.Queue[int], drain_timeout_s: float
) -> None:
    await signals.get()
    engine.draining = True
    deadline = time.monotonic() + drain_timeout_s
    while engine.num_unfinished and signals.empty() and time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
    engine.fail_all(draining())
    server.should_exit = True
