"""The host process: loads the model, lays out device memory, starts the device's loop, shakes
hands.

Then it has nothing more to do, and may be stopped or killed: tokens keep coming. At SIGTERM it
tells the device, through memory, to finish what is there and stop.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine import progress
from engine.config import ServeConfig
from engine.control.open_path import open_path
from engine.device import open_device
from engine.errors import UserError
from engine.handshake import HandshakeServer, ModelCard, Offer
from engine.model.source import ModelSource, open_model
from engine.protocol import EngineState, Geometry
from engine.scheduler_memory import ModelLimits
from engine.state import Command
from engine.timeline import write_timeline
from engine.window_file import WindowFile

DRAIN_TIMEOUT_S = 10.0
WHO_DRIVES = {
    "persistent": "the device drives itself",
    "sync": "the host drives the device, taking turns with it",
    "async": "the host drives the device, one step ahead of it",
}


def model_limits(config: ServeConfig, source: ModelSource) -> ModelLimits:
    """Raises UserError when the configured context is beyond the model's."""
    wanted = config.scheduler.max_context
    if wanted > source.spec.max_context:
        raise UserError(
            f"max_context={wanted} is more than the {source.spec.max_context} positions of model "
            f"{source.spec.name}; give --max-context {source.spec.max_context} or less"
        )
    return ModelLimits(source.spec.vocab_size, wanted, source.spec.eos_ids)


def epoch_now() -> int:
    """A number that no earlier start on this machine had."""
    return time.time_ns()


class Host:
    """One engine: its memory, its loop, its offer to SmartNICs. A context manager."""

    def __init__(self, config: ServeConfig) -> None:
        progress.progress(f"opening model {config.model.model}")
        source = open_model(config.model.model)
        limits = model_limits(config, source)
        card = model_card(config, source, limits)
        geometry = Geometry(
            config.ring.num_slots,
            config.ring.token_ring_entries,
            limits.max_context,
            limits.vocab_size,
        )
        epoch = epoch_now()
        num_bytes = config.ring.num_ports * geometry.port_bytes
        self._device = open_device(config)
        self._file = WindowFile(config.window) if config.window.file else None
        if self._file is not None:
            self._file.withdraw()
        self._window = self._device.make_window(
            num_bytes,
            self._file.path if self._file else None,
            config.window.offset,
            config.window.home,
        )
        self.model_id = card.model_id
        self.window = f"{self._window.home}, {num_bytes >> 10} KiB"
        self._path = open_path(config, self._device, source, limits, self._window, epoch)
        self._path.start()
        offer = Offer(
            window_fd=self._window.fd,
            window_handle=self._window.handle.hex(),
            window_offset=self._window.offset,
            geometry=geometry,
            num_ports=config.ring.num_ports,
            epoch=epoch,
            window=self.window,
            card=card,
            server_info=server_info(config),
        )
        if self._file is not None:
            self._file.offer(offer.to_mapping(), num_bytes)
        self._server = HandshakeServer(config.handshake_socket, offer)

    def drain(self) -> bool:
        """Tell the device to finish and stop; whether it did within DRAIN_TIMEOUT_S.

        Raises UserError when the device is gone.
        """
        try:
            return self._drain()
        except self._device.lost_errors as error:
            raise UserError("the device was gone before it could be told to stop") from error

    def _drain(self) -> bool:
        self._path.command(Command.DRAIN)
        if self._wait_stopped(DRAIN_TIMEOUT_S):
            return True
        self._path.command(Command.STOP)
        return self._wait_stopped(DRAIN_TIMEOUT_S)

    def write_timeline(self, file: Path, path: str) -> None:
        """The last steps of a loop that has halted. Raises UserError when that cannot be done."""
        write_timeline(file, path, self._path.timeline())

    def _wait_stopped(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        halted = (EngineState.STOPPED, EngineState.FATAL)
        while time.monotonic() < deadline:
            if self._path.state() in halted:
                return True
            time.sleep(0.01)
        return False

    def close(self) -> None:
        """Stop answering handshakes. Device memory goes with the device."""
        self._server.close()
        if self._file is not None:
            self._file.withdraw()
            self._file.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def model_card(config: ServeConfig, source: ModelSource, limits: ModelLimits) -> ModelCard:
    """What SmartNICs are told of the model."""
    pool_tokens = config.scheduler.num_pages * config.scheduler.page_size
    return ModelCard(
        model_id=source.spec.name,
        max_model_len=min(limits.max_context, pool_tokens),
        vocab_size=limits.vocab_size,
        eos_ids=limits.eos_ids,
        tokenizer=source.card,
    )


def server_info(config: ServeConfig) -> dict[str, Any]:
    """Facts for /server_info and reports."""
    scheduler = config.scheduler
    return {
        "model": config.model.model,
        "device": config.device.device,
        "link": config.link,
        "link_reason": config.link_reason,
        "path": config.path,
        "num_pages": scheduler.num_pages,
        "page_size": scheduler.page_size,
        "max_running": scheduler.max_running,
        "max_step_tokens": scheduler.max_step_tokens,
        "max_context": scheduler.max_context,
        "ring_slots": config.ring.num_slots,
        "token_ring_entries": config.ring.token_ring_entries,
        "num_ports": config.ring.num_ports,
        "numpy": np.__version__,
    }


def wait_for_stop_signal() -> None:
    """Return at SIGTERM or SIGINT, whichever thread the kernel hands it to.

    The signal is read from a pipe: a wait in the interpreter would miss one that another thread
    takes, as happens after a freeze.
    """
    reading_end, writing_end = os.pipe()
    os.set_blocking(writing_end, False)
    signal.set_wakeup_fd(writing_end)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    os.read(reading_end, 1)


def serve(config: ServeConfig) -> int:
    """Start the engine, wait for the stop signal, drain; the exit status."""
    with Host(config) as host:
        progress.ready(WHO_DRIVES[config.path], window=host.window, model_id=host.model_id)
        wait_for_stop_signal()
        if not host.drain():
            return 1
        if config.timeline:
            host.write_timeline(Path(config.timeline), config.path)
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.host", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="ServeConfig as a JSON file")
    config = ServeConfig.from_json(parser.parse_args().config.read_text())
    return progress.run_child(lambda: serve(config), debug=config.debug)


if __name__ == "__main__":
    sys.exit(main())
