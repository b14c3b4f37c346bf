"""The scripted model: a byte-level vocabulary and a model that repeats what it is told.

It emits the prompt's tokens that follow the last SEP, then EOS. Ids 0-255 are bytes, then BOS,
EOS and SEP, then the multi-byte strings of a JSON file. The forward pass is a device kernel of
its own; here are the model's numbers and its tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from engine.model.card import TokenizerCard
from engine.model.spec import ModelError, ModelSpec

BOS_ID, EOS_ID, SEP_ID = 256, 257, 258
FIRST_STRING_ID = 259
MAX_STRINGS = 1 << 16
SPECIAL_TEXTS = {"<|bos|>": BOS_ID, "<|eos|>": EOS_ID, "<|sep|>": SEP_ID}
MAX_CONTEXT = 1 << 20

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% set said = namespace(last='') %}"
    "{% for message in messages %}"
    "{{ message['content'] }}"
    "{% if message['role'] == 'user' %}{% set said.last = message['content'] %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|sep|>{{ said.last }}{% endif %}"
)
"""Renders a conversation so that the answer is the last user message."""


def read_strings(path: Path) -> tuple[str, ...]:
    """The strings of a scripted model's JSON file; raises ModelError for any other content."""
    try:
        strings = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not a JSON file: {error}.") from error
    if not isinstance(strings, list) or not all(
        isinstance(string, str) and string for string in strings
    ):
        raise ModelError(f"{path} must hold a JSON list of strings that are not empty.")
    if len(set(strings)) != len(strings):
        raise ModelError(f"{path} holds a string twice; each must have one id.")
    if len(strings) > MAX_STRINGS:
        raise ModelError(f"{path} holds {len(strings)} strings; {MAX_STRINGS} are possible.")
    try:
        "".join(strings).encode()
    except UnicodeEncodeError as error:
        raise ModelError(f"{path} holds half a surrogate pair, which has no UTF-8.") from error
    return tuple(strings)


def scripted_spec(name: str, strings: tuple[str, ...]) -> ModelSpec:
    """The numbers of a scripted model: no layers, no weights, no KV."""
    return ModelSpec(
        name=name,
        architecture="scripted",
        vocab_size=FIRST_STRING_ID + len(strings),
        max_context=MAX_CONTEXT,
        bos_id=BOS_ID,
        eos_ids=(EOS_ID,),
    )


def scripted_card(strings: tuple[str, ...]) -> TokenizerCard:
    """The tokenizer of a scripted model."""
    return TokenizerCard(
        kind="scripted",
        vocab_size=FIRST_STRING_ID + len(strings),
        bos_id=BOS_ID,
        eos_ids=(EOS_ID,),
        chat_template=CHAT_TEMPLATE,
        add_bos=False,
        bos_text="<|bos|>",
        eos_text="<|eos|>",
        strings=strings,
    )


class ScriptedTokenizer:
    """Greedy: at each place the longest of the special texts, the strings, one byte."""

    def __init__(self, card: TokenizerCard) -> None:
        self.vocab_size = card.vocab_size
        self.eos_ids = card.eos_ids
        self.token_bytes = [bytes([byte]) for byte in range(256)]
        self.token_bytes += [b""] * len(SPECIAL_TEXTS)
        self.token_bytes += [string.encode() for string in card.strings]
        self._ids = {text.encode(): token_id for text, token_id in SPECIAL_TEXTS.items()}
        for token_id in range(FIRST_STRING_ID, len(self.token_bytes)):
            self._ids.setdefault(self.token_bytes[token_id], token_id)
        # Ids beyond (of a model with random weights) are shown by their number, never encoded.
        unnamed = range(len(self.token_bytes), card.vocab_size)
        self.token_bytes += [f" {token_id}".encode() for token_id in unnamed]
        # Alternatives are tried in order: special texts, then longest first, then any byte.
        texts = [re.escape(text.encode()) for text in SPECIAL_TEXTS]
        longest = sorted(self._ids.keys() - {text.encode() for text in SPECIAL_TEXTS}, key=len)
        pattern = b"|".join([*texts, *map(re.escape, reversed(longest)), b"."])
        self._pattern = re.compile(pattern, re.DOTALL)

    def encode(self, text: str, add_special: bool) -> list[int]:
        del add_special  # a plain prompt gets no BOS: what is written is what is sent
        data = text.encode("utf-8", errors="replace")
        pieces: list[bytes] = self._pattern.findall(data)
        return [self._ids[piece] if piece in self._ids else piece[0] for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes[token_id] for token_id in ids).decode(errors="replace")
