"""What both generating endpoints do: check, reserve, tokenize, submit, answer."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from engine.ring import RequestParams
from engine.smartnic.choice import Choice
from engine.smartnic.detokenizer import Detokenizer
from engine.smartnic.engine import Engine
from engine.smartnic.errors import context_length_exceeded, invalid, model_not_found
from engine.smartnic.exchange import Exchange
from engine.smartnic.logprob_choice import LogprobChoice
from engine.smartnic.logprobs import TokenLogprob
from engine.smartnic.reply import Piece, Reply
from engine.smartnic.served_model import ServedModel
from engine.smartnic.streaming import PieceEvents, stream
from engine.smartnic.validation import Field, check_together, parse_fields


class Endpoint(Protocol):
    """What the two endpoints differ in."""

    fields: tuple[Field, ...]
    chat: bool
    id_prefix: str
    object_name: str
    chunk_object_name: str
    input_name: str

    def count_inputs(self, body: Mapping[str, Any]) -> int:
        """How many prompts there are: to be known before they are looked at."""

    def inputs(
        self, body: Mapping[str, Any], max_tokens: int | None, model: ServedModel
    ) -> list[Any]:
        """The checked prompts, not yet tokenized. max_tokens: as asked, None if it was not."""

    async def encode(self, prompt: Any, max_tokens: int | None, model: ServedModel) -> list[int]:
        """Token ids of one of them."""

    def max_tokens(self, values: Mapping[str, Any]) -> tuple[str, int | None]:
        """The field that limits the answer, and its value; None: as much as fits."""

    def num_logprobs(self, values: Mapping[str, Any]) -> int:
        """Alternatives that are wanted with each token; -1: no logprobs at all."""

    def choice(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        """A choice of an unstreamed response, `logprobs` still null."""

    def logprobs(self, tokens: Sequence[TokenLogprob], table: Sequence[bytes]) -> dict[str, Any]:
        """The field of that name, of a choice as of a chunk. table: bytes of every token id."""


class Generator:
    """Serves one endpoint's requests with one model."""

    def __init__(self, endpoint: Endpoint, engine: Engine, model: ServedModel) -> None:
        self._endpoint = endpoint
        self._engine = engine
        self._model = model

    async def __call__(self, exchange: Exchange) -> None:
        """One request, from its body to the last byte of its response."""
        body = await exchange.read_json()
        endpoint, model = self._endpoint, self._model
        values = parse_fields(body, endpoint.fields, model.limits)
        if values["model"] not in (None, model.name):
            raise model_not_found(values["model"], model.name)
        check_together(values)
        num_inputs = endpoint.count_inputs(body)
        num_choices = num_inputs * values["n"]
        if num_choices > model.limits.num_slots:
            raise invalid(
                endpoint.input_name if num_inputs > 1 else "n",
                f"{num_choices} choices are requested, {model.limits.num_slots} are possible.",
            )
        limit_name, _ = endpoint.max_tokens(values)
        inputs = endpoint.inputs(body, values[limit_name], model)
        job = _Job(exchange, endpoint, self._engine, model, values, num_choices)
        watcher = exchange.on_disconnect(job.abandon)
        try:
            with self._engine.reserve(num_choices):
                prompts = [await job.encode(prompt) for prompt in inputs]
            if not job.reply.abandoned:
                job.submit(prompts)
                await job.answer()
        finally:
            watcher.cancel()
            job.abandon()


class _Job:
    """One request on its way."""

    def __init__(
        self,
        exchange: Exchange,
        endpoint: Endpoint,
        engine: Engine,
        model: ServedModel,
        values: Mapping[str, Any],
        num_choices: int,
    ) -> None:
        self._exchange = exchange
        self._endpoint = endpoint
        self._engine = engine
        self._model = model
        self._values = values
        self._choices: list[Choice] = []
        self._with_timing = exchange.header(b"x-blinkbed-timing") == "1"
        self._limit_name, self._max_tokens = endpoint.max_tokens(values)
        self._num_logprobs = endpoint.num_logprobs(values)
        self.reply = Reply(num_choices, streamed=values["stream"])

    async def encode(self, prompt: Any) -> list[int]:
        """Token ids of one prompt, and the proof that it and its answer fit."""
        endpoint, context = self._endpoint, self._model.limits.context
        ids = await endpoint.encode(prompt, self._max_tokens, self._model)
        if not ids:
            raise invalid(endpoint.input_name, f"{endpoint.input_name} must not be empty.")
        asked = self._values[self._limit_name]
        if len(ids) + (asked or 1) > context:
            raise context_length_exceeded(endpoint.input_name, context, len(ids), asked)
        return ids

    def submit(self, prompts: list[list[int]]) -> None:
        """Put all choices on the device, or none that goes on."""
        n = self._values["n"]
        for index in range(len(prompts) * n):
            choice = self._make_choice(index, prompts[index // n], index % n)
            self._choices.append(choice)
        for choice in self._choices:
            self._engine.submit(choice)

    def _make_choice(self, index: int, prompt_ids: list[int], sample: int) -> Choice:
        values = self._values
        room = self._model.limits.context - len(prompt_ids)
        asked = self._max_tokens
        seed = values["seed"]
        params = RequestParams(
            max_tokens=room if asked is None else min(asked, room),
            min_tokens=min(values["min_tokens"], room),
            num_logprobs=self._num_logprobs,
            seed=secrets.randbits(64) if seed is None else (seed + sample) & ((1 << 64) - 1),
            **{name: values[name] for name in PASSED_ON},
        )
        detokenizer = Detokenizer(
            self._model.token_bytes,
            values["stop"],
            values["include_stop_str_in_output"],
            values["min_tokens"],
        )
        make: Callable[..., Choice] = Choice
        if self._num_logprobs >= 0:
            make = functools.partial(LogprobChoice, table=self._model.token_bytes)
        return make(
            index,
            self.reply,
            params,
            prompt_ids,
            detokenizer,
            include_stop=values["include_stop_str_in_output"],
            with_ids=values["return_token_ids"],
        )

    def abandon(self) -> None:
        """Nobody waits for what is still running."""
        self.reply.abandon()
        for choice in self._choices:
            self._engine.abandon(choice)

    async def answer(self) -> None:
        """Stream, or wait and send it whole."""
        if self._values["stream"]:
            await self._stream()
        else:
            await self._send_whole()

    def _head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self._endpoint.id_prefix + self._exchange.request_id,
            "object": object_name,
            "created": int(time.time()),
            "model": self._model.name,
        }

    async def _stream(self) -> None:
        options = self._values["stream_options"] or {}
        with_usage = bool(options.get("include_usage"))
        head = self._head(self._endpoint.chunk_object_name)
        events = PieceEvents(
            head,
            chat=self._endpoint.chat,
            null_usage=with_usage,
            usage=self._running_usage if options.get("continuous_usage_stats") else None,
            prompt_ids=self._prompt_ids(),
            logprobs=self._logprobs if self._num_logprobs >= 0 else None,
        )

        def usage_chunk() -> dict[str, Any]:
            return {**head, "choices": [], "usage": self._usage()}

        await stream(self._exchange, self.reply, events.render, usage_chunk if with_usage else None)

    async def _send_whole(self) -> None:
        pieces = await self.reply.take()
        if self.reply.abandoned:
            return
        if self.reply.error is not None:
            raise self.reply.error
        by_choice: list[list[Piece]] = [[] for _ in self._choices]
        for piece in pieces:
            by_choice[piece.choice].append(piece)
        choices = [self._whole_choice(index, own) for index, own in enumerate(by_choice)]
        await self._exchange.send_json(
            200,
            {
                **self._head(self._endpoint.object_name),
                "choices": choices,
                "usage": self._usage(),
            },
        )

    def _whole_choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        choice = self._endpoint.choice(index, text, pieces[-1].finish_reason)
        if self._num_logprobs >= 0:
            choice["logprobs"] = self._logprobs([one for p in pieces for one in p.logprobs])
        prompt_ids = self._prompt_ids()
        if prompt_ids is not None:
            choice["prompt_token_ids"] = prompt_ids[index]
            choice["token_ids"] = [token for piece in pieces for token in piece.token_ids]
        return choice

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._endpoint.logprobs(tokens, self._model.token_bytes)

    def _prompt_ids(self) -> list[list[int]] | None:
        if not self._values["return_token_ids"]:
            return None
        return [choice.prompt_ids for choice in self._choices]

    def _num_prompt_tokens(self) -> int:
        """A prompt counts once, however many choices it has."""
        return sum(len(choice.prompt_ids) for choice in self._choices[:: self._values["n"]])

    def _usage(self) -> dict[str, Any]:
        usage = _usage(self._num_prompt_tokens(), sum(c.num_tokens for c in self._choices))
        if self._with_timing:
            usage["blinkbed"] = self._timings()
        return usage

    def _running_usage(self, piece: Piece) -> dict[str, Any]:
        return _usage(len(self._choices[piece.choice].prompt_ids), piece.num_tokens)

    def _timings(self) -> Any:
        timings = [dataclasses.asdict(choice.timing) for choice in self._choices]
        return timings[0] if len(timings) == 1 else timings


PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "ignore_eos",
    "stop_token_ids",
    "logit_bias",
    "priority",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
"""Fields whose checked value is a parameter of the record."""


def _usage(num_prompt_tokens: int, num_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
    }
