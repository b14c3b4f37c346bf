"""What requests may contain: nothing but an ApiError that names the field is ever raised."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.smartnic import inputs, validation
from engine.smartnic.errors import ApiError
from engine.smartnic.exchange import parse_object
from engine.smartnic.validation import CHAT_FIELDS, COMPLETION_FIELDS, Field, Limits

LIMITS = Limits(context=100, vocab_size=300, num_slots=8)
FIELDS = {field.name: field for field in (*CHAT_FIELDS, *COMPLETION_FIELDS)}
TABLES = (CHAT_FIELDS, COMPLETION_FIELDS)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def parse(fields: tuple[Field, ...], **body: Any) -> dict[str, Any]:
    values: dict[str, Any] = validation.parse_fields(body, fields, LIMITS)
    validation.check_together(values)
    return values


def error_of(call: Callable[[], object]) -> ApiError | None:
    """What the call refuses; any other exception is a failure."""
    try:
        call()
    except ApiError as error:
        return error
    return None


def root(error: ApiError) -> str:
    """The field that an error's param starts with."""
    assert error.param is not None
    return re.split(r"[.\[]", error.param)[0]


def refused(**body: Any) -> str | None:
    """The field that the error names."""
    with pytest.raises(ApiError) as caught:
        parse(COMPLETION_FIELDS, **body)
    assert caught.value.status == 400
    return caught.value.param


@given(st.sampled_from(sorted(FIELDS)), json_values)
def test_any_value_of_any_field_is_taken_or_refused_by_name(name: str, value: Any) -> None:
    for table in TABLES:
        if name in {field.name for field in table}:
            error = error_of(
                functools.partial(validation.parse_fields, {name: value}, table, LIMITS)
            )
            assert error is None or (error.status, root(error)) == (400, name)


@given(json_values)
def test_any_prompt_is_taken_or_refused(value: Any) -> None:
    error = error_of(lambda: inputs.prompts(value, None, LIMITS))
    assert error is None or error.param == "prompt"
    if error is None:
        prompts = inputs.prompts(value, None, LIMITS)
        assert prompts
        assert all(prompts)


@given(json_values)
def test_any_messages_are_taken_or_refused(value: Any) -> None:
    error = error_of(lambda: inputs.messages(value))
    assert error is None or root(error) == "messages"
    if error is None:
        assert all(type(m["content"]) is str for m in inputs.messages(value))


@given(st.binary(max_size=40))
def test_any_body_is_an_object_or_refused(body: bytes) -> None:
    error = error_of(lambda: parse_object(body))
    assert error is None or error.status == 400


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"\xff", b"", b"null", b"[1]"]
)
def test_a_hostile_body_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError):
        parse_object(body)


@pytest.mark.parametrize("table", TABLES)
def test_null_is_absent_everywhere(table: tuple[Field, ...]) -> None:
    nulls = dict.fromkeys((field.name for field in table), None)
    assert parse(table, **nulls) == parse(table)


@pytest.mark.parametrize("table", TABLES)
def test_what_benchmark_tools_send_is_taken(table: tuple[Field, ...]) -> None:
    parse(
        table,
        model="m",
        repetition_penalty=1.0,
        logprobs=None,
        stop=None,
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
        some_unknown_field=3,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", True),
        ("temperature", "1"),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("temperature", 10**400),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.0),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 2**70),
        ("seed", 2**64),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", [1]),
        ("stop", ["a"] * 100),
        ("stop", "\ud800"),
        ("n", 0),
        ("logit_bias", {"300": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"AI": 1}),
        ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {"1": 100.5}),
        ("logit_bias", {str(token): 1 for token in range(301)}),
        ("logit_bias", []),
        ("stop_token_ids", [300]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**63]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", "1"),
        ("stop_token_ids", list(range(33))),
        ("stop_token_ids", [1] * 33),
        ("stream_options", {"include_usage": True}),  # without stream
        ("echo", True),
        ("logprobs", 1),
        ("best_of", 2),
        ("suffix", "x"),
        ("stream", 1),
        ("user", 7),
    ],
)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any) -> None:
    assert refused(**{name: value}) == name


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    "key", ["--5", "-5", "-", "", "+5", " 5", "5\n", "1_0", "\u00b2", "\u0665"]
)
def test_a_bias_key_that_is_no_token_id_is_refused(table: tuple[Field, ...], key: str) -> None:
    error = error_of(lambda: parse(table, logit_bias={key: 1}))
    assert error is not None
    assert (error.status, error.param) == (400, "logit_bias")


@pytest.mark.parametrize("name", ["top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [1e-300, 1e-40, 1e300])
def test_a_number_that_single_precision_lacks_is_refused(name: str, value: float) -> None:
    assert refused(**{name: value}) == name


def test_a_limit_of_0_is_refused_in_plain_words() -> None:
    for name in ("max_tokens", "n"):
        error = error_of(functools.partial(parse, COMPLETION_FIELDS, **{name: 0}))
        assert error is not None
        assert error.message == f"{name} must be at least 1, not a number (0)."


def test_no_messages_are_refused_in_plain_words() -> None:
    error = error_of(lambda: inputs.messages([]))
    assert error is not None
    assert error.message == "messages must have at least one message."


@pytest.mark.parametrize("nested", [False, True])
def test_ids_that_do_not_fit_are_refused_by_their_number_alone(nested: bool) -> None:
    ids = ["no id"] * LIMITS.context
    error = error_of(lambda: inputs.prompts([ids] if nested else [1, *ids[1:]], 7, LIMITS))
    assert error is not None
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert f"{LIMITS.context + 7} tokens" in error.message


def test_prompts_are_counted_unread() -> None:
    for value, count in (("ab", 1), (None, 1), ([], 1), ([1, 2], 1), ([[], 5], 2), (["", 5], 2)):
        assert inputs.count_prompts(value) == count


def test_min_tokens_above_max_tokens_is_refused() -> None:
    assert refused(min_tokens=5, max_tokens=4) == "min_tokens"


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("temperature", 0, 0.0),
        ("top_k", -1, 0),
        ("top_k", 0, 0),
        ("top_k", 5, 5),
        ("top_k", 10**9, 0),
        ("seed", -1, 2**64 - 1),
        ("logit_bias", {}, ()),
        ("logit_bias", {"299": -100, "7": 1.5}, ((299, -100.0), (7, 1.5))),
        ("stop", [], None),
        ("stop_token_ids", [1, 1, 2], (1, 2)),
        ("echo", False, False),
    ],
)
def test_values_that_mean_the_same_become_the_same(name: str, value: Any, taken: Any) -> None:
    assert parse(COMPLETION_FIELDS, **{name: value})[name] == taken


@pytest.mark.parametrize(
    "prompt", ["", [""], [], [[]], None, [[1], []], ["a", ""], 7, {}, True, [1, "a"], ["a", 1]]
)
def test_an_empty_or_mixed_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(ApiError) as caught:
        inputs.prompts(prompt, None, LIMITS)
    assert caught.value.param == "prompt"


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = inputs.messages([{"role": "user", "content": parts}])
    assert messages == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": [], "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "\udc00"}, "messages[0].content"),
    ],
)
def test_a_wrong_message_is_refused_by_its_place(message: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        inputs.messages([message])
    assert caught.value.param == param
