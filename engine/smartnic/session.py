"""The SmartNIC's session: how it reaches the window, first and again, on every link.

The links differ in nothing but the handshake: with the host over a Unix socket, or with the RNIC
over the network.
"""

from __future__ import annotations

from engine.config import ServeConfig
from engine.errors import UserError
from engine.handshake import ModelCard, Session, connect
from engine.link.verbs import connect_verbs
from engine.ring import RingClient

PORT = 0


def open_session(config: ServeConfig, *, timeout_s: float = 30.0) -> Session:
    """Shake hands; raises UserError or LinkError when there is no session within `timeout_s`."""
    if not config.is_rdma:
        return connect(config.handshake_socket, port=PORT, timeout_s=timeout_s)
    if not config.rnic.address:
        raise UserError(f"--link {config.link} needs --rnic ADDRESS: where the GPU's RNIC answers")
    session = connect_verbs(
        config.rnic.address,
        config.rnic.port,
        port=PORT,
        config=config.verbs,
        timeout_s=timeout_s,
    )
    card = ModelCard.from_mapping(session.offer["card"])
    return Session(session.link, card, session.offer["server_info"])


class Reconnector:
    """Makes new ring clients in place of a lost one: same model, or none.

    A call blocks for up to `timeout_s`. Raises UserError or LinkError where it does not work yet.
    """

    def __init__(self, config: ServeConfig, card: ModelCard, *, timeout_s: float = 5.0) -> None:
        self._config, self._card, self._timeout_s = config, card, timeout_s

    def __call__(self) -> RingClient:
        session = open_session(self._config, timeout_s=self._timeout_s)
        try:
            if session.card != self._card:
                raise UserError(
                    f"the host now offers another model ({session.card.model_id}); "
                    "start the SmartNIC anew"
                )
            return RingClient(session.link, timeout_s=self._timeout_s)
        except BaseException:
            session.link.close()
            raise
