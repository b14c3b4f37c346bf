"""The endpoints that say something: /v1/models, /version, /server_info, /tokenize, /detokenize."""

from __future__ import annotations

import engine as package
from engine.smartnic.engine import Engine
from engine.smartnic.errors import invalid
from engine.smartnic.exchange import Exchange
from engine.smartnic.inputs import messages
from engine.smartnic.served_model import ServedModel
from engine.smartnic.validation import boolean, describe, string, token_ids


class Information:
    """Handlers over one engine and one model; shapes as vLLM's."""

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        self._engine, self._model = engine, model

    async def models(self, exchange: Exchange) -> None:
        """The one model."""
        await exchange.send_json(200, {"object": "list", "data": [self._model.describe()]})

    async def version(self, exchange: Exchange) -> None:
        """Of this program."""
        await exchange.send_json(200, {"version": package.__version__})

    async def server_info(self, exchange: Exchange) -> None:
        """What the host said at the handshake, and the link as this side sees it."""
        facts = {**self._model.server_info, **self._engine.link_facts()}
        await exchange.send_json(200, facts)

    async def tokenize(self, exchange: Exchange) -> None:
        """Token ids of a prompt, or of messages in the model's chat template."""
        body = await exchange.read_json()
        model = self._model
        if body.get("messages") is not None:
            ids = await model.encode_chat(messages(body["messages"]), None)
        else:
            prompt = body.get("prompt")
            if type(prompt) is not str:
                raise invalid("prompt", f"prompt must be a string, not {describe(prompt)}.")
            special = body.get("add_special_tokens")
            wanted = (
                True if special is None else boolean("add_special_tokens", special, model.limits)
            )
            ids = await model.encode_text(string("prompt", prompt), special=wanted)
        context = model.limits.context
        answer = {"count": len(ids), "max_model_len": context, "tokens": ids}
        await exchange.send_json(200, answer)

    async def detokenize(self, exchange: Exchange) -> None:
        """The text of token ids."""
        body = await exchange.read_json()
        if type(body.get("tokens")) is not list:
            raise invalid("tokens", f"tokens must be a list, not {describe(body.get('tokens'))}.")
        ids = token_ids("tokens", body["tokens"], self._model.limits)
        await exchange.send_json(200, {"prompt": self._model.tokenizer.decode(ids)})
