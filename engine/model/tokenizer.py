"""Tokenizers made from a card: text to ids, and for each id exactly the bytes it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tokenizers

from engine.model.card import TokenizerCard
from engine.model.scripted import ScriptedTokenizer
from engine.model.spec import ModelError

_SPACE_MARK = "\u2581"  # sentencepiece's stand-in for a space


class Tokenizer(Protocol):
    """What the SmartNIC uses of a tokenizer; safe to call from several threads."""

    @property
    def vocab_size(self) -> int:
        """Ids from 0 to this, exclusive, can come from the model."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""

    @property
    def token_bytes(self) -> list[bytes]:
        """The bytes that each id contributes to the text; empty for special tokens.

        A character may be divided over several ids. Joined and decoded (``errors="replace"``)
        they give what :meth:`decode` gives, but for one leading space of sentencepiece
        tokenizers, which only a text's beginning drops.
        """

    def encode(self, text: str, add_special: bool) -> list[int]:
        """Ids of ``text``, in which special tokens are recognised.

        ``add_special``: put BOS before it where the model wants that (plain prompts, not
        rendered chat templates).
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids from a text's beginning, without special tokens."""


def load_tokenizer(card: TokenizerCard) -> Tokenizer:
    """Make the tokenizer of a card; raises ModelError if its description is not one."""
    if card.kind == "scripted":
        return ScriptedTokenizer(card)
    return HuggingFaceTokenizer(card)


class HuggingFaceTokenizer:
    """A tokenizer of the ``tokenizers`` library."""

    def __init__(self, card: TokenizerCard) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer_json)
            description = json.loads(card.tokenizer_json)
        except Exception as error:  # the library raises plain Exception
            raise ModelError(
                f"the model's tokenizer.json cannot be read ({error}); update the tokenizers "
                "package or get the file again."
            ) from error
        self.vocab_size = card.vocab_size
        self.eos_ids = card.eos_ids
        self._bos_id = card.bos_id if card.add_bos else None
        self.token_bytes = _token_bytes(self._tokenizer, description, card.vocab_size)

    def encode(self, text: str, add_special: bool) -> list[int]:
        # Not encode(): that one holds the interpreter's lock all the while.
        batch = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
        ids: list[int] = batch[0].ids
        if add_special and self._bos_id is not None and ids[:1] != [self._bos_id]:
            ids.insert(0, self._bos_id)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def _token_bytes(
    tokenizer: tokenizers.Tokenizer, description: dict[str, Any], vocab_size: int
) -> list[bytes]:
    to_bytes = _piece_decoder(description.get("decoder"))
    special = {
        int(token["id"]) for token in description.get("added_tokens") or [] if token["special"]
    }
    table = [b""] * vocab_size
    for piece, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and token_id not in special:
            table[token_id] = to_bytes(piece)
    return table


def _piece_decoder(decoder: dict[str, Any] | None) -> Callable[[str], bytes]:
    """How a vocabulary entry of a tokenizer with this decoder becomes bytes."""
    kinds = {step["type"] for step in _steps(decoder)}
    if "ByteLevel" in kinds:
        return _byte_level
    replaced = [
        step["pattern"].get("String", "") for step in _steps(decoder) if step["type"] == "Replace"
    ]
    if "Metaspace" in kinds or "ByteFallback" in kinds or _SPACE_MARK in replaced:
        return _sentencepiece
    raise ModelError(
        f"a tokenizer with decoder {sorted(kinds) or None} is not supported; byte-level BPE and "
        "sentencepiece with byte fallback are."
    )


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's character for each byte: printable Latin-1 as itself, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in piece])
    except KeyError:  # an added token, kept as text
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(_SPACE_MARK, " ").encode()
