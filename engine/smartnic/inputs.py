"""What a request gives the model to read: a completion's prompts, a chat's messages."""

from __future__ import annotations

from typing import Any

from engine.smartnic.errors import ApiError, context_length_exceeded, invalid, unsupported
from engine.smartnic.validation import Limits, describe, string, token_ids

Prompt = str | list[int]


def count_prompts(value: Any) -> int:
    """How many prompts the prompt field has, before anything of it is checked."""
    several = type(value) is list and value and type(value[0]) in (str, list)
    return len(value) if several else 1


def prompts(value: Any, max_tokens: int | None, limits: Limits) -> list[Prompt]:
    """The prompt field of a completion: a string, strings, ids, or lists of ids.

    max_tokens: what is asked for the answer; ids that leave no room for it are refused unread.
    """
    name = "prompt"
    if value is None:
        raise invalid(name, "prompt is missing.", code="missing_required_parameter")
    if type(value) is str:
        return [_nonempty(string(name, value), name)]
    if type(value) is not list:
        raise invalid(name, f"prompt must be a string or a list, not {describe(value)}.")
    if not value:
        raise invalid(name, "prompt must not be empty.")
    if type(value[0]) in (str, list):
        return [
            _nonempty(_one(item, f"{name}[{i}]", max_tokens, limits), name)
            for i, item in enumerate(value)
        ]
    return [_ids(name, value, max_tokens, limits)]


def _ids(name: str, value: Any, max_tokens: int | None, limits: Limits) -> list[int]:
    if type(value) is list and len(value) + (max_tokens or 1) > limits.context:
        raise context_length_exceeded("prompt", limits.context, len(value), max_tokens)
    return token_ids(name, value, limits)


def _one(value: Any, name: str, max_tokens: int | None, limits: Limits) -> Prompt:
    try:
        if type(value) is str:
            return string(name, value)
        return _ids(name, value, max_tokens, limits)
    except ApiError as error:
        error.param = "prompt"
        raise


def _nonempty(prompt: Prompt, param: str) -> Prompt:
    if not prompt:
        raise invalid(param, "prompt must not be empty.")
    return prompt


ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat as templates expect them: role and content, a string."""
    name = "messages"
    if value is None:
        raise invalid(name, "messages is missing.", code="missing_required_parameter")
    if type(value) is not list:
        raise invalid(name, f"messages must be a list of messages, not {describe(value)}.")
    if not value:
        raise invalid(name, "messages must have at least one message.")
    return [_message(item, f"{name}[{i}]") for i, item in enumerate(value)]


def _message(value: Any, name: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise invalid(name, f"{name} must be an object, not {describe(value)}.")
    role = value.get("role")
    if role not in ROLES:
        raise invalid(
            f"{name}.role", f"{name}.role must be one of {', '.join(ROLES)}, not {describe(role)}."
        )
    if value.get("tool_calls"):
        raise unsupported(f"{name}.tool_calls", "tool calls are not supported here.")
    content = value.get("content")
    if content is None and role != "assistant":
        raise invalid(f"{name}.content", f"{name}.content is missing.")
    message = {
        "role": "system" if role == "developer" else role,
        "content": _content(content, f"{name}.content"),
    }
    if value.get("name") is not None:
        message["name"] = string(f"{name}.name", value["name"])
    return message


def _content(value: Any, name: str) -> str:
    if value is None:
        return ""
    if type(value) is str:
        return string(name, value)
    if type(value) is not list:
        raise invalid(name, f"{name} must be a string or a list of parts, not {describe(value)}.")
    texts = []
    for position, part in enumerate(value):
        param = f"{name}[{position}]"
        if type(part) is not dict:
            raise invalid(param, f"{param} must be an object, not {describe(part)}.")
        if part.get("type") != "text":
            raise unsupported(f"{param}.type", f"{param}.type must be 'text': no other is served.")
        texts.append(string(f"{param}.text", part.get("text")))
    return "\n".join(texts)
