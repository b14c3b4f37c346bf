"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.smartnic import validation
from engine.smartnic.inputs import Prompt, count_prompts, prompts
from engine.smartnic.logprobs import TokenLogprob, completion_logprobs
from engine.smartnic.served_model import ServedModel

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class Completions:
    """Prompts are strings or token ids; several prompts give several choices."""

    fields = validation.COMPLETION_FIELDS
    chat = False
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    input_name = "prompt"

    def count_inputs(self, body: Mapping[str, Any]) -> int:
        return count_prompts(body.get("prompt"))

    def inputs(
        self, body: Mapping[str, Any], max_tokens: int | None, model: ServedModel
    ) -> list[Prompt]:
        return prompts(body.get("prompt"), max_tokens, model.limits)

    async def encode(self, prompt: Prompt, max_tokens: int | None, model: ServedModel) -> list[int]:
        return await model.encode_prompt(prompt, max_tokens)

    def max_tokens(self, values: Mapping[str, Any]) -> tuple[str, int | None]:
        return "max_tokens", values["max_tokens"] or DEFAULT_MAX_TOKENS

    def num_logprobs(self, values: Mapping[str, Any]) -> int:
        return -1 if values["logprobs"] is None else int(values["logprobs"])

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}

    def logprobs(self, tokens: Sequence[TokenLogprob], table: Sequence[bytes]) -> dict[str, Any]:
        return completion_logprobs(tokens, table)
