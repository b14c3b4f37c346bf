"""``python -m engine.smartnic``: shake hands with the host, then serve HTTP over the ring."""

from __future__ import annotations

import argparse
import socket
import sys
from pathlib import Path

from engine import progress
from engine.config import ServeConfig
from engine.errors import UserError
from engine.handshake import Session
from engine.link import LinkError
from engine.model.tokenizer import load_tokenizer
from engine.protocol import MAX_LOGPROBS, Geometry
from engine.ring import RingClient
from engine.smartnic.chat_template import ChatTemplate
from engine.smartnic.engine import Engine
from engine.smartnic.served_model import ServedModel
from engine.smartnic.server import BACKLOG, serve
from engine.smartnic.session import Reconnector, open_session
from engine.smartnic.validation import Limits

HANDSHAKE_TIMEOUT_S = 60.0


def listen(host: str, port: int, fd: int | None) -> socket.socket:
    """The listening socket: inherited by number, or bound here; UserError if that fails."""
    if fd is not None:
        return socket.socket(fileno=fd)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"cannot listen on {host}:{port} ({reason}); give another --host or --port"
        ) from error


def served_model(session: Session, geometry: Geometry) -> ServedModel:
    """The model of the host's card."""
    card = session.card
    template = None
    if card.tokenizer.chat_template:
        tokens = {"bos_token": card.tokenizer.bos_text, "eos_token": card.tokenizer.eos_text}
        template = ChatTemplate(card.tokenizer.chat_template, tokens)
    limits = Limits(
        context=card.max_model_len,
        vocab_size=card.vocab_size,
        num_slots=geometry.num_slots,
        max_logprobs=min(MAX_LOGPROBS, geometry.token_ring_entries - 1),
    )
    tokenizer = load_tokenizer(card.tokenizer)
    return ServedModel(card.model_id, tokenizer, template, limits, session.server_info)


def run(config: ServeConfig, listen_fd: int | None) -> int:
    """Serve until told to stop; the exit status."""
    smartnic = config.smartnic
    listener = listen(smartnic.host, smartnic.port, listen_fd)
    progress.progress("shaking hands with the host")
    try:
        session = open_session(config, timeout_s=HANDSHAKE_TIMEOUT_S)
        ring = RingClient(session.link)
    except LinkError as error:
        raise UserError(f"no session with the device: {error}") from error
    progress.progress(f"link: {session.link.info.description}")
    model = served_model(session, ring.geometry)
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    reconnect = Reconnector(config, session.card) if config.is_rdma else None
    serve(
        listener,
        Engine(ring, smartnic.heartbeat_timeout_s, reconnect),
        model,
        drain_timeout_s=smartnic.drain_timeout_s,
        on_ready=lambda: progress.ready(f"serving {model.name} on {url}", url=url),
    )
    model.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.smartnic", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="ServeConfig as a JSON file")
    parser.add_argument("--listen-fd", type=int, help="a listening socket that we inherited")
    arguments = parser.parse_args()
    config = ServeConfig.from_json(arguments.config.read_text())
    return progress.run_child(lambda: run(config, arguments.listen_fd), debug=config.debug)


if __name__ == "__main__":
    sys.exit(main())
