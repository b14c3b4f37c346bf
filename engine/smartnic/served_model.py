"""The model as the front end knows it: names, limits, tokenizer and chat template."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from engine.model.tokenizer import Tokenizer
from engine.smartnic.chat_template import ChatTemplate
from engine.smartnic.errors import context_length_exceeded, unsupported
from engine.smartnic.inputs import Prompt
from engine.smartnic.validation import Limits

INLINE_CHARS = 1024  # shorter texts cost less than a change of threads
SPECIAL_CHARS = 64  # no special token's text is longer; their bytes are not in the token table

T = TypeVar("T")


class ServedModel:
    """One model. Long texts are tokenized in a thread, so that they delay nobody else."""

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        limits: Limits,
        server_info: dict[str, Any],
    ) -> None:
        self.name = name
        self.server_info = server_info
        self.tokenizer = tokenizer
        self.limits = limits
        self.created = int(time.time())
        self.token_bytes: Sequence[bytes] = tokenizer.token_bytes
        self._chat_template = chat_template
        self._longest_token = max(SPECIAL_CHARS, *map(len, self.token_bytes))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def describe(self) -> dict[str, Any]:
        """The model's entry in /v1/models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "blinkbed",
            "root": self.name,
            "parent": None,
            "max_model_len": self.limits.context,
        }

    async def encode_prompt(self, prompt: Prompt, max_tokens: int | None) -> list[int]:
        """Token ids of a completion's prompt."""
        if not isinstance(prompt, str):
            return prompt
        self._refuse_hopeless("prompt", prompt, max_tokens)
        return await self._run(len(prompt), lambda: self.tokenizer.encode(prompt, True))

    async def encode_text(self, text: str, *, special: bool) -> list[int]:
        """Token ids of a text, with the model's BOS before it if `special`."""
        return await self._run(len(text), lambda: self.tokenizer.encode(text, special))

    async def encode_chat(
        self, messages: list[dict[str, Any]], max_tokens: int | None
    ) -> list[int]:
        """Token ids of a chat; the template writes the special tokens itself."""
        template = self._chat_template
        if template is None:
            raise unsupported("messages", "This model has no chat template; use /v1/completions.")
        size = sum(len(message["content"]) for message in messages) + 16 * len(messages)

        def render_and_encode() -> list[int]:
            text = template.render(messages)
            self._refuse_hopeless("messages", text, max_tokens)
            return self.tokenizer.encode(text, False)

        return await self._run(size, render_and_encode)

    def _refuse_hopeless(self, param: str, text: str, max_tokens: int | None) -> None:
        """Refuse by the least number of tokens that a text can have, before tokenizing it."""
        least = -(-len(text.encode()) // self._longest_token)
        if least >= self.limits.context:
            raise context_length_exceeded(
                param, self.limits.context, least, max_tokens, exact=False
            )

    async def _run(self, size: int, job: Callable[[], T]) -> T:
        if size <= INLINE_CHARS:
            return job()
        return await asyncio.get_running_loop().run_in_executor(self._thread, job)

    def close(self) -> None:
        """End the thread; idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
