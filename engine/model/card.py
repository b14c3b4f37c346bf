"""The tokenizer's card: all that the SmartNIC needs of a model, small enough for the handshake."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["huggingface", "scripted"]


@dataclass(frozen=True, slots=True)
class TokenizerCard:
    """A tokenizer and its model's text conventions, as plain data.

    The SmartNIC never sees the model's files: it gets this, and ``engine.model.tokenizer``
    makes a tokenizer of it.
    """

    kind: Kind
    vocab_size: int
    """Rows of the model's embedding; the tokenizer may know fewer ids."""
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None
    """Jinja source; None: the model has no notion of a chat."""
    add_bos: bool = False
    """Whether a plain prompt begins with BOS (a rendered chat template never gets one more)."""
    bos_text: str = ""
    """How the template's variable ``bos_token`` reads."""
    eos_text: str = ""
    """How the template's variable ``eos_token`` reads."""
    tokenizer_json: str = ""
    """kind "huggingface": the text of a ``tokenizer.json``."""
    strings: tuple[str, ...] = ()
    """kind "scripted": the multi-byte strings with ids from 259."""

    def to_json(self) -> str:
        """As one line of JSON."""
        return json.dumps(dataclasses.asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> TokenizerCard:
        """The inverse of :meth:`to_json`; an unknown key raises TypeError."""
        fields: dict[str, Any] = json.loads(text)
        for key in ("eos_ids", "strings"):
            fields[key] = tuple(fields[key])
        return cls(**fields)
