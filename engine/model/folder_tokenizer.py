"""The tokenizer's card of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.model.card import TokenizerCard
from engine.model.safetensors import read_json
from engine.model.spec import ModelError, ModelSpec


def folder_card(path: Path, spec: ModelSpec) -> TokenizerCard:
    """Read tokenizer.json, tokenizer_config.json and the chat template.

    Raises ModelError if there is no tokenizer.json.
    """
    try:
        description = (path / "tokenizer.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} holds no readable tokenizer.json ({error}).") from error
    config_path = path / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    return TokenizerCard(
        kind="huggingface",
        vocab_size=spec.vocab_size,
        bos_id=spec.bos_id,
        eos_ids=spec.eos_ids,
        chat_template=_chat_template(path, config),
        add_bos=bool(config.get("add_bos_token", False)) and spec.bos_id is not None,
        bos_text=_text(config.get("bos_token")),
        eos_text=_text(config.get("eos_token")),
        tokenizer_json=description,
    )


def _chat_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {one["name"]: one["template"] for one in template}.get("default")
    return template if isinstance(template, str) else None


def _text(token: Any) -> str:
    """A token's text, which is kept plain or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
