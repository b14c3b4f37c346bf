"""What a request may contain: one table row per field, for both endpoints.

A row's parser gets the JSON value and the limits and returns the checked value, or raises an
ApiError that names the field. JSON's null is "absent" everywhere; unknown fields are ignored.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.protocol import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from engine.smartnic.detokenizer import StopSet
from engine.smartnic.errors import invalid, unsupported

MAX_STOP_STRINGS = 32
MAX_STOP_CHARS = 4096
MAX_ID_CHARS = 256
GREEDY_BELOW_TEMPERATURE = 1e-5
TOKEN_KEY = re.compile(r"-?[0-9]{1,20}")
MIN_SINGLE = float(np.finfo(np.float32).tiny)  # the device's floats; smaller ones become 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine behind can take.

    context: tokens of prompt and answer together. num_slots: requests on the device at once.
    """

    context: int
    vocab_size: int
    num_slots: int


Parser = Callable[[str, Any, Limits], Any]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the API: its value when absent and how a given value is checked."""

    name: str
    default: Any
    parse: Parser


def parse_fields(body: Mapping[str, Any], fields: tuple[Field, ...], limits: Limits) -> Any:
    """Every field of the table by name, checked; raises ApiError for the first that is wrong."""
    values = {}
    for field in fields:
        value = body.get(field.name)
        values[field.name] = (
            field.default if value is None else field.parse(field.name, value, limits)
        )
    return values


def describe(value: Any) -> str:
    """A value as an error message shows it: its JSON type, and itself if that is short."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    name = names.get(type(value), "a number" if type(value) in (int, float) else "null")
    if type(value) is int and value.bit_length() > 128:
        return "a number of more than 128 bits"
    text = repr(value) if type(value) in (int, float, bool, str) else ""
    return f"{name} ({text})" if 0 < len(text) <= 60 else name


def whole(low: int, high: int) -> Parser:
    """An integer; booleans and 1.0 are none."""

    def parse(name: str, value: Any, limits: Limits) -> int:
        if type(value) is not int:
            raise invalid(name, f"{name} must be an integer, not {describe(value)}.")
        if not low <= value <= high:
            bound = f"at least {low}" if value < low else f"at most {high}"
            raise invalid(name, f"{name} must be {bound}, not {describe(value)}.")
        return value

    return parse


def number(low: float, high: float, *, open_low: bool = False, single: bool = False) -> Parser:
    """A finite number of a range. single: what is not 0 must not be 0 for the device either."""

    def parse(name: str, value: Any, limits: Limits) -> float:
        if type(value) not in (int, float):
            raise invalid(name, f"{name} must be a number, not {describe(value)}.")
        if not low <= value <= high or (open_low and value == low):  # false for NaN
            above = "above" if open_low else "at least"
            raise invalid(
                name, f"{name} must be {above} {low} and at most {high}, not {describe(value)}."
            )
        if single and 0 < abs(value) < MIN_SINGLE:
            raise invalid(
                name, f"{name} must not be as close to 0 as {value}: use {MIN_SINGLE:.2g} or more."
            )
        return float(value)

    return parse


def boolean(name: str, value: Any, limits: Limits) -> bool:
    if type(value) is not bool:
        raise invalid(name, f"{name} must be a boolean, not {describe(value)}.")
    return value


def string(name: str, value: Any, limits: Limits | None = None) -> str:
    """A string that can be encoded: JSON can carry lone surrogates, which no text has."""
    if type(value) is not str:
        raise invalid(name, f"{name} must be a string, not {describe(value)}.")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise invalid(name, f"{name} has a lone surrogate, which is no character.") from None
    return value


def seed(name: str, value: Any, limits: Limits) -> int:
    """Any 64-bit integer, signed or not, as the device's unsigned one."""
    checked: int = whole(-(1 << 63), (1 << 64) - 1)(name, value, limits)
    return checked & ((1 << 64) - 1)


def top_k(name: str, value: Any, limits: Limits) -> int:
    """0 and -1 mean off, as does anything beyond the vocabulary."""
    checked: int = whole(-1, sys.maxsize)(name, value, limits)
    return checked if 0 < checked < limits.vocab_size else 0


def temperature(name: str, value: Any, limits: Limits) -> float:
    checked: float = number(0, 2)(name, value, limits)
    return checked if checked >= GREEDY_BELOW_TEMPERATURE else 0.0


def token_ids(name: str, value: Any, limits: Limits) -> list[int]:
    """A list of ids, all in the vocabulary. Written for long lists: no loop when all is well."""
    if type(value) is not list:
        raise invalid(name, f"{name} must be a list of token ids, not {describe(value)}.")
    if value and (
        set(map(type, value)) != {int} or min(value) < 0 or max(value) >= limits.vocab_size
    ):
        vocabulary = range(limits.vocab_size)
        for position, token in enumerate(value):
            if type(token) is not int or token not in vocabulary:
                token_id(f"{name}[{position}]", token, limits, param=name)
    return value


def token_id(name: str, value: Any, limits: Limits, param: str | None = None) -> int:
    if type(value) is not int:
        raise invalid(param or name, f"{name} must be a token id, not {describe(value)}.")
    if not 0 <= value < limits.vocab_size:
        shown = value if value.bit_length() <= 128 else describe(value)
        raise invalid(
            param or name,
            f"{name}: {shown} is not in the vocabulary; ids go from 0 to {limits.vocab_size - 1}.",
        )
    return value


def stop_token_ids(name: str, value: Any, limits: Limits) -> tuple[int, ...]:
    if type(value) is list and len(value) > MAX_STOP_TOKEN_IDS:
        raise invalid(name, f"{name} has more than {MAX_STOP_TOKEN_IDS} ids.")
    return tuple(dict.fromkeys(token_ids(name, value, limits)))


def stop(name: str, value: Any, limits: Limits) -> StopSet | None:
    """A string or a list of strings, none empty."""
    if type(value) not in (str, list):
        raise invalid(name, f"{name} must be a string or a list of them, not {describe(value)}.")
    given = [value] if type(value) is str else value
    if len(given) > MAX_STOP_STRINGS:
        raise invalid(name, f"{name} has more than {MAX_STOP_STRINGS} strings.")
    stops = [string(name, text) for text in given]
    if not all(stops):
        raise invalid(name, f"{name} must not have an empty string: it would match at once.")
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise invalid(name, f"{name} has more than {MAX_STOP_CHARS} characters in all.")
    return StopSet(stops) if stops else None


def logit_bias(name: str, value: Any, limits: Limits) -> tuple[tuple[int, float], ...]:
    """{"token id": bias}; the ids are strings because JSON has no other keys. Of several ways to
    write one id ("7", "07") the last one counts."""
    if type(value) is not dict:
        raise invalid(name, f"{name} must be an object, not {describe(value)}.")
    if len(value) > MAX_LOGIT_BIAS:
        raise invalid(name, f"{name} has more than {MAX_LOGIT_BIAS} entries.")
    pairs = []
    for key, bias in value.items():
        if not TOKEN_KEY.fullmatch(key):
            raise invalid(name, f"{name} has the key {describe(key)}, which is no token id.")
        token = token_id(name, int(key), limits)
        pairs.append((token, number(-100, 100)(name, bias, limits)))
    return tuple(pairs)


def stream_options(name: str, value: Any, limits: Limits) -> dict[str, Any]:
    if type(value) is not dict:
        raise invalid(name, f"{name} must be an object, not {describe(value)}.")
    for option in ("include_usage", "continuous_usage_stats"):
        given = value.get(option)
        if given is not None and type(given) is not bool:
            param = f"{name}.{option}"
            raise invalid(param, f"{param} must be a boolean, not {describe(given)}.")
    return value


def only(*accepted: Any, why: str = "is not supported here") -> Parser:
    """A known field of which only the values that change nothing are served."""

    def parse(name: str, value: Any, limits: Limits) -> None:
        if not any(type(value) is type(same) and value == same for same in accepted):
            raise unsupported(name, f"{name} {why}.")

    return parse


def after(check: Parser, unless: Any) -> Parser:
    """An unsupported field whose value is nevertheless checked first."""

    def parse(name: str, value: Any, limits: Limits) -> Any:
        checked = check(name, value, limits)
        if checked != unless:
            raise unsupported(name, f"{name} is not supported here.")
        return checked

    return parse


ANY = sys.maxsize

COMMON_FIELDS: tuple[Field, ...] = (
    Field("model", None, string),
    Field("temperature", 1.0, temperature),
    Field("top_p", 1.0, number(0, 1, open_low=True, single=True)),
    Field("top_k", 0, top_k),
    Field("min_p", 0.0, number(0, 1, single=True)),
    Field("seed", None, seed),
    Field("stop", None, stop),
    Field("stop_token_ids", (), stop_token_ids),
    Field("include_stop_str_in_output", False, boolean),
    Field("max_tokens", None, whole(1, ANY)),
    Field("min_tokens", 0, whole(0, ANY)),
    Field("ignore_eos", False, boolean),
    Field("n", 1, whole(1, 128)),
    Field("frequency_penalty", 0.0, number(-2, 2)),
    Field("presence_penalty", 0.0, number(-2, 2)),
    Field("repetition_penalty", 1.0, number(0, 10, open_low=True, single=True)),
    Field("logit_bias", (), logit_bias),
    Field("stream", False, boolean),
    Field("stream_options", None, stream_options),
    Field("priority", 0, whole(-(1 << 31), (1 << 31) - 1)),
    Field("return_token_ids", False, boolean),
    Field("user", None, string),
    Field("response_format", None, only({"type": "text"})),
    Field("skip_special_tokens", True, only(True)),
    Field("prompt_logprobs", None, only()),
    Field("use_beam_search", False, only(False)),
    Field("bad_words", None, only([])),
    Field("allowed_token_ids", None, only()),
    Field("truncate_prompt_tokens", None, only()),
    Field("structured_outputs", None, only()),
    Field("guided_json", None, only()),
    Field("guided_regex", None, only()),
    Field("guided_choice", None, only()),
    Field("guided_grammar", None, only()),
)

COMPLETION_FIELDS: tuple[Field, ...] = (
    *COMMON_FIELDS,
    Field("echo", False, after(boolean, False)),
    Field("logprobs", None, only()),
    Field("best_of", 1, only(1)),
    Field("suffix", None, only("")),
)

CHAT_FIELDS: tuple[Field, ...] = (
    *COMMON_FIELDS,
    Field("max_completion_tokens", None, whole(1, ANY)),
    Field("logprobs", False, after(boolean, False)),
    Field("top_logprobs", None, only(0)),
    Field("tools", None, only([])),
    Field("tool_choice", None, only("none", "auto")),
    Field("functions", None, only([])),
    Field("function_call", None, only("none", "auto")),
    Field("modalities", None, only(["text"])),
    Field("audio", None, only()),
    Field("prediction", None, only()),
    Field("chat_template", None, only()),
    Field("chat_template_kwargs", None, only({})),
    Field("add_generation_prompt", True, only(True)),
    Field("continue_final_message", False, only(False)),
    Field("documents", None, only([])),
)


def check_together(values: Mapping[str, Any]) -> None:
    """Rules over more than one field."""
    limit = values["max_tokens"]
    if limit is not None and values["min_tokens"] > limit:
        raise invalid(
            "min_tokens", f"min_tokens {values['min_tokens']} is more than max_tokens {limit}."
        )
    if values["stream_options"] and not values["stream"]:
        raise invalid("stream_options", "stream_options is only for stream = true.")
