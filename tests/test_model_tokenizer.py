"""Tokenizers: their bytes join to the text, special tokens are recognised, cards survive JSON."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from engine.model.card import TokenizerCard
from engine.model.source import open_model
from engine.model.spec import ModelError
from engine.model.tokenizer import Tokenizer, load_tokenizer
from tests.model_files import byte_level_tokenizer, random_model, save_folder, save_gguf

TEXTS = [
    "the quick brown fox, again and again",
    "  leading, trailing and   many spaces \n\n\tand tabs ",
    "123 4567 isn't it? I'll say: don't!",
    "äöüß – „Anführung“ … ¿qué? 日本語のテキスト עברית",
    "👩‍👩‍👧‍👦 family, 🇫🇷 flag, 👍🏽 thumb, e\u0301 combined",
    "\x00\x7f\u2028 control",
    "",
]


def assert_bytes_join(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, False)
    joined = b"".join(tokenizer.token_bytes[token] for token in ids)
    assert joined.decode(errors="replace") == tokenizer.decode(ids)


def random_text(seed: int) -> str:
    rng = np.random.default_rng(seed)
    ranges = [(32, 127), (0xA0, 0x250), (0x3040, 0x30FF), (0x1F300, 0x1F700), (9, 14)]
    picks = [ranges[int(index)] for index in rng.integers(0, len(ranges), 60)]
    return "".join(chr(int(rng.integers(low, high))) for low, high in picks)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = save_folder(random_model("Qwen2"), tmp_path_factory.mktemp("byte-level"))
    return load_tokenizer(open_model(str(folder)).card)


@pytest.mark.parametrize("text", TEXTS + [random_text(seed) for seed in range(20)])
def test_byte_level_bytes_join_to_the_text(byte_level: Tokenizer, text: str) -> None:
    assert_bytes_join(byte_level, text)
    assert byte_level.decode(byte_level.encode(text, False)) == text


@pytest.mark.parametrize("text", TEXTS + [random_text(seed) for seed in range(20)])
def test_default_model_bytes_join_to_the_text(text: str, smollm2_tokenizer: Tokenizer) -> None:
    assert_bytes_join(smollm2_tokenizer, text)
    # Its vocabulary lacks a few control bytes; what it has comes back.
    if "\x00" not in text:
        assert smollm2_tokenizer.decode(smollm2_tokenizer.encode(text, False)) == text


@pytest.fixture(scope="module")
def smollm2_tokenizer() -> Tokenizer:
    try:
        return load_tokenizer(open_model("smollm2").card)
    except ModelError as error:
        pytest.skip(f"the default model cannot be had: {error}")


def test_every_id_joins_alone_as_the_library_decodes_it(smollm2_tokenizer: Tokenizer) -> None:
    for token in range(smollm2_tokenizer.vocab_size):
        expected = smollm2_tokenizer.decode([token])
        assert smollm2_tokenizer.token_bytes[token].decode(errors="replace") == expected


def test_special_tokens_are_recognised_and_have_no_bytes(smollm2_tokenizer: Tokenizer) -> None:
    ids = smollm2_tokenizer.encode("<|im_start|>user\nhi<|im_end|>", False)
    assert (ids[0], ids[-1]) == (1, 2)
    assert smollm2_tokenizer.token_bytes[1] == smollm2_tokenizer.token_bytes[2] == b""
    assert smollm2_tokenizer.eos_ids == (2,)


def test_added_text_keeps_its_bytes(byte_level: Tokenizer) -> None:
    added = byte_level.encode("a<tool call ü>", False)[-1]
    assert byte_level.token_bytes[added] == "<tool call ü>".encode()
    assert byte_level.token_bytes[:3] == [b"", b"", b""]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("sentencepiece") / "tiny.gguf"
    return load_tokenizer(open_model(str(save_gguf(random_model("Llama"), path))).card)


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(sentencepiece: Tokenizer) -> None:
    # Pieces from id 259: space, a, b, ab, space-ab, é, space-a, abab; higher scores merge first.
    assert sentencepiece.encode("ab", False) == [263]
    assert sentencepiece.encode("abab", True) == [1, 263, 262]
    assert sentencepiece.encode("é€", False)[1:] == [264, 3 + 0xE2, 3 + 0x82, 3 + 0xAC]


@pytest.mark.parametrize("text", TEXTS + [random_text(seed) for seed in range(20)])
def test_sentencepiece_bytes_join_to_the_text(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text, False)
    joined = b"".join(sentencepiece.token_bytes[token] for token in ids).decode(errors="replace")
    # Only a text's beginning drops the space that encoding put before it.
    assert joined.removeprefix(" ") == sentencepiece.decode(ids) == text


def test_metaspace_tokenizers_of_folders_are_read(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "\u2581": 1, "h": 2, "i": 3, "\u2581h": 4, "<0xE2>": 5}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab, [("\u2581", "h")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    card = TokenizerCard("huggingface", 8, None, (), None, tokenizer_json=tokenizer.to_str())
    assert load_tokenizer(card).token_bytes == [
        b"<unk>",
        b" ",
        b"h",
        b"i",
        b" h",
        b"\xe2",
        b"",
        b"",
    ]


def test_cards_survive_json() -> None:
    for model in ("scripted",):
        card = open_model(model).card
        assert TokenizerCard.from_json(card.to_json()) == card
    text = byte_level_tokenizer().to_str()
    card = TokenizerCard("huggingface", 320, 1, (2,), "{{ x }}", True, "<s>", "</s>", text)
    assert TokenizerCard.from_json(card.to_json().encode()) == card


@pytest.mark.parametrize("text", ["", "{}", "[1]", json.dumps({"model": {"type": "BPE"}})])
def test_broken_tokenizer_json_is_an_error(text: str) -> None:
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        load_tokenizer(TokenizerCard("huggingface", 8, None, (), None, tokenizer_json=text))


def test_folder_card_takes_template_and_bos(tmp_path: Path) -> None:
    folder = save_folder(random_model("Llama", eos_token_id=[2, 7]), tmp_path)
    config = {
        "chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}],
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "add_bos_token": True,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    card = open_model(str(folder)).card
    assert (card.chat_template, card.bos_text, card.eos_text) == ("y", "<s>", "</s>")
    assert card.eos_ids == (2, 7)
    assert load_tokenizer(card).encode("a", True)[0] == 1
    (folder / "chat_template.jinja").write_text("z")
    assert open_model(str(folder)).card.chat_template == "z"
