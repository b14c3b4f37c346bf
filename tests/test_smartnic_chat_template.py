"""Chat templates as Hugging Face models bring them, and what they must not be able to do."""

from __future__ import annotations

import pytest

from engine.smartnic.chat_template import ChatTemplate
from engine.smartnic.errors import ApiError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [{"role": "user", "content": "<b>&"}, {"role": "assistant", "content": "hi"}]


def render(source: str) -> str:
    return ChatTemplate(source, TOKENS).render(MESSAGES)


def test_blocks_leave_no_lines_and_text_is_not_escaped() -> None:
    source = "{% for m in messages %}\n  {{ m.content }}|\n{% endfor %}\n"
    assert render(source) == "  <b>&|\n  hi|\n"


def test_what_templates_expect_is_there() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}"
        "{% if add_generation_prompt %}>{% endif %}{% if not tools %}.{% endif %}"
    )
    assert render(source) == '<s>{"role": "user", "content": "<b>&"}4>.'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ undefined_name.attribute }}",
    ],
)
def test_a_template_that_fails_is_the_clients_error(source: str) -> None:
    with pytest.raises(ApiError) as caught:
        render(source)
    assert caught.value.status == 400
    assert caught.value.param == "messages"


def test_a_refusal_is_passed_on() -> None:
    with pytest.raises(ApiError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
