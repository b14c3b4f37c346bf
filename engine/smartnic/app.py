"""The ASGI application: which path goes where, and what becomes of errors."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from engine.smartnic import metrics
from engine.smartnic.chat import Chat
from engine.smartnic.completions import Completions
from engine.smartnic.engine import Engine
from engine.smartnic.errors import ApiError
from engine.smartnic.exchange import ClientLeftError, Exchange, Message, Receive, Send
from engine.smartnic.generation import Generator
from engine.smartnic.information import Information
from engine.smartnic.served_model import ServedModel

logger = logging.getLogger("blinkbed.smartnic")

Handler = Callable[[Exchange], Awaitable[None]]


class App:
    """OpenAI's API over one engine and one model.

    Plain ASGI: the way of a token is `send` and nothing else, and a table of paths is all the
    routing that this API has.
    """

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        self._engine = engine
        information = Information(engine, model)
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/completions": {"POST": Generator(Completions(), engine, model)},
            "/v1/chat/completions": {"POST": Generator(Chat(), engine, model)},
            "/v1/models": {"GET": information.models},
            "/version": {"GET": information.version},
            "/server_info": {"GET": information.server_info},
            "/tokenize": {"POST": information.tokenize},
            "/detokenize": {"POST": information.detokenize},
            "/health": {"GET": self._alive},
            "/livez": {"GET": self._alive},
            "/readyz": {"GET": self._ready},
            "/metrics": {"GET": self._metrics},
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"not served over ASGI: {scope['type']}")
        exchange = Exchange(scope, receive, send)
        try:
            await self._handler(exchange)(exchange)
        except ClientLeftError:
            pass
        except ApiError as error:
            self._engine.metrics.rejected.labels(error.code or "invalid").inc()
            await exchange.send_error(error)
        except Exception:
            logger.exception("bug in the handler of %s %s", exchange.method, exchange.path)
            if exchange.started:
                raise
            await exchange.send_error(
                ApiError(500, "Internal error.", code="internal_error", kind="server_error")
            )

    def _handler(self, exchange: Exchange) -> Handler:
        methods = self._routes.get(exchange.path)
        if methods is None:
            return _not_found
        handler = methods.get("GET" if exchange.method == "HEAD" else exchange.method)
        return handler or _not_allowed(", ".join(methods))

    async def _alive(self, exchange: Exchange) -> None:
        await exchange.send_json(200, {"status": "ok"})

    async def _ready(self, exchange: Exchange) -> None:
        reason = self._engine.unready_reason()
        if reason is None:
            await exchange.send_json(200, {"status": "ready"})
        else:
            await exchange.send_json(503, {"status": "unready", "reason": reason})

    async def _metrics(self, exchange: Exchange) -> None:
        await self._engine.refresh()
        body = self._engine.metrics.render()
        await exchange.send(200, body, metrics.CONTENT_TYPE.encode())


async def _not_found(exchange: Exchange) -> None:
    message = f"There is no {exchange.path} here."
    await exchange.send_error(ApiError(404, message, code="not_found"))


def _not_allowed(allowed: str) -> Handler:
    async def refuse(exchange: Exchange) -> None:
        message = f"{exchange.method} is not possible on {exchange.path}; use {allowed}."
        error = ApiError(405, message, code="method_not_allowed")
        await exchange.send_json(405, error.body(), [(b"allow", allowed.encode())])

    return refuse
