"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.smartnic import validation
from engine.smartnic.inputs import messages
from engine.smartnic.logprobs import TokenLogprob, chat_logprobs
from engine.smartnic.served_model import ServedModel


class Chat:
    """The model's template turns the messages into one prompt; the answer may fill the context."""

    fields = validation.CHAT_FIELDS
    chat = True
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    input_name = "messages"

    def count_inputs(self, body: Mapping[str, Any]) -> int:
        return 1

    def inputs(
        self, body: Mapping[str, Any], max_tokens: int | None, model: ServedModel
    ) -> list[list[dict[str, Any]]]:
        return [messages(body.get("messages"))]

    async def encode(
        self, prompt: list[dict[str, Any]], max_tokens: int | None, model: ServedModel
    ) -> list[int]:
        return await model.encode_chat(prompt, max_tokens)

    def max_tokens(self, values: Mapping[str, Any]) -> tuple[str, int | None]:
        name = "max_completion_tokens"
        if values[name] is None:
            name = "max_tokens"
        return name, values[name]

    def num_logprobs(self, values: Mapping[str, Any]) -> int:
        return (values["top_logprobs"] or 0) if values["logprobs"] else -1

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text},
            "logprobs": None,
            "finish_reason": finish_reason,
        }

    def logprobs(self, tokens: Sequence[TokenLogprob], table: Sequence[bytes]) -> dict[str, Any]:
        return chat_logprobs(tokens, table)
