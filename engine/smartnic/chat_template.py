"""A model's chat template: Jinja from the model's files, rendered in a sandbox."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.smartnic.errors import ApiError, invalid


class TemplateRefusedError(Exception):
    """What a template's raise_exception() raises: the messages do not suit the model."""


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusedError(message)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Unlike Jinja's own filter without HTML escapes: prompts are no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """Renders messages to the prompt text of one model.

    source: Jinja. tokens: names such as bos_token and eos_token that templates refer to. The
    environment has the extensions and functions that Hugging Face templates expect.
    """

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._tokens = tokens

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The prompt, ending where the assistant's answer begins; ApiError 400 if refused."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._tokens
            )
        except TemplateRefusedError as error:
            raise invalid("messages", f"The chat template refuses the messages: {error}") from None
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise _failed(error) from None


def _failed(error: Exception) -> ApiError:
    return invalid("messages", f"The chat template fails on the messages: {error}")
