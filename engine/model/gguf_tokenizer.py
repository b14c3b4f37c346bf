"""A GGUF file's tokenizer as a ``tokenizer.json`` of the Hugging Face library.

GGUF keeps vocabulary, merges (or sentencepiece scores) and the name of the pre-tokenizer; the
regular expressions behind those names are part of what llama.cpp and the models' own
``tokenizer.json`` define.
"""

from __future__ import annotations

import json
from typing import Any

from engine.model.card import TokenizerCard
from engine.model.gguf import GgufFile
from engine.model.spec import ModelError

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS_AND_SPACE = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACE}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_SYMBOLS_AND_SPACE}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _split(pattern: str) -> list[dict[str, Any]]:
    regex = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    return [{**regex, "invert": False}, _byte_level(use_regex=False)]


_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_byte_level(use_regex=True)],
    "default": [_byte_level(use_regex=True)],
    "smollm": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
    "llama-bpe": _split(_LLAMA3),
    "llama3": _split(_LLAMA3),
    "qwen2": _split(_QWEN2),
    "tekken": _split(_TEKKEN),
}
_IGNORE_MERGES = ("llama-bpe", "llama3", "tekken")  # a word that is a token is that token
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "tekken")


def gguf_card(file: GgufFile) -> TokenizerCard:
    """The card of a GGUF file's tokenizer; raises ModelError for a kind that is not supported."""
    tokens = file.metadata("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelError(f"{file.path}: the file holds no tokenizer.")
    kind, pre = file.metadata("tokenizer.ggml.model"), file.metadata("tokenizer.ggml.pre")
    if kind == "gpt2":
        description = _byte_level_bpe(file, tokens, pre or "default")
        add_bos = pre in _BOS_BY_DEFAULT
    elif kind == "llama":
        description = _sentencepiece(file, tokens)
        add_bos = True
    else:
        raise ModelError(
            f"{file.path}: tokenizer kind {kind!r} is not supported; gpt2 (byte-level BPE) and "
            "llama (sentencepiece) are."
        )
    spec = file.spec
    bos_text = tokens[spec.bos_id] if spec.bos_id is not None else ""
    return TokenizerCard(
        kind="huggingface",
        vocab_size=spec.vocab_size,
        bos_id=spec.bos_id,
        eos_ids=spec.eos_ids,
        chat_template=file.metadata("tokenizer.chat_template"),
        add_bos=bool(file.metadata("tokenizer.ggml.add_bos_token", add_bos))
        and spec.bos_id is not None,
        bos_text=bos_text,
        eos_text=tokens[file.metadata("tokenizer.ggml.eos_token_id", 0)],
        tokenizer_json=json.dumps(description, ensure_ascii=False),
    )


def _byte_level_bpe(file: GgufFile, tokens: list[str], pre: str) -> dict[str, Any]:
    if pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{file.path}: pre-tokenizer {pre!r} is not known; "
            f"{', '.join(sorted(_PRE_TOKENIZERS))} are."
        )
    merges = file.metadata("tokenizer.ggml.merges")
    if not merges:
        raise ModelError(f"{file.path}: the tokenizer has no merges; the file is incomplete.")
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(file, tokens),
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE_TOKENIZERS[pre]},
        "post_processor": None,
        "decoder": {**_byte_level(use_regex=True), "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre in _IGNORE_MERGES,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


def _sentencepiece(file: GgufFile, tokens: list[str]) -> dict[str, Any]:
    scores = file.metadata("tokenizer.ggml.scores")
    if not scores or len(scores) != len(tokens):
        raise ModelError(f"{file.path}: the tokenizer has no scores; the file is incomplete.")
    vocab = {token: index for index, token in enumerate(tokens)}
    prefix = bool(file.metadata("tokenizer.ggml.add_space_prefix", True))
    normalizers: list[dict[str, Any]] = [{"type": "Prepend", "prepend": "\u2581"}] if prefix else []
    normalizers.append({"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"})
    strip = {"type": "Strip", "content": " ", "start": 1 if prefix else 0, "stop": 0}
    replace = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    unknown = file.metadata("tokenizer.ggml.unknown_token_id", 0)
    return {
        "version": "1.0",
        "added_tokens": _added_tokens(file, tokens),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}, strip],
        },
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": _merges_of_scores(vocab, scores),
        },
    }


def _merges_of_scores(vocab: dict[str, int], scores: list[float]) -> list[list[str]]:
    """Sentencepiece's BPE as merges: each way to divide a piece, likeliest pieces first."""
    ranked = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [[left, right] for *_, left, right in ranked]


def _added_tokens(file: GgufFile, tokens: list[str]) -> list[dict[str, Any]]:
    kinds = file.metadata("tokenizer.ggml.token_type") or [1] * len(tokens)
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind != _USER_DEFINED,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
