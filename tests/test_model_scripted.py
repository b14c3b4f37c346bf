"""The scripted model's vocabulary, and the files that extend it."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2
import pytest

from engine.model.scripted import BOS_ID, EOS_ID, SEP_ID
from engine.model.source import open_model
from engine.model.spec import ModelError, device_weights
from engine.model.tokenizer import Tokenizer, load_tokenizer


def scripted(folder: Path, *strings: str) -> Tokenizer:
    file = folder / "strings.json"
    file.write_text(json.dumps(strings))
    return load_tokenizer(open_model(f"scripted:{file}").card)


def test_bytes_are_their_own_ids() -> None:
    tokenizer = load_tokenizer(open_model("scripted").card)
    text = "Grüße 👋"
    assert tokenizer.encode(text, True) == list(text.encode())
    assert tokenizer.token_bytes[:256] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.decode([*text.encode(), EOS_ID]) == text
    assert tokenizer.vocab_size == len(tokenizer.token_bytes) == 259
    assert tokenizer.decode(list("é".encode())[:1]) == "\ufffd"


def test_special_texts_are_recognised() -> None:
    tokenizer = load_tokenizer(open_model("scripted").card)
    ids = tokenizer.encode("<|bos|>a<|sep|>b<|eos|><|sep", False)
    assert ids == [BOS_ID, ord("a"), SEP_ID, ord("b"), EOS_ID, *b"<|sep"]
    assert tokenizer.eos_ids == (EOS_ID,)


def test_strings_match_longest_first(tmp_path: Path) -> None:
    tokenizer = scripted(tmp_path, "DEF", "G", "DEFG", "é", "<|sep|>x")
    assert tokenizer.encode("DEFGG", False) == [261, 260]
    assert tokenizer.encode("DEé", False) == [*b"DE", 262]
    assert tokenizer.encode("<|sep|>x", False) == [SEP_ID, ord("x")]
    assert tokenizer.token_bytes[259:] == [b"DEF", b"G", b"DEFG", "é".encode(), b"<|sep|>x"]


def test_template_makes_the_last_user_message_the_answer() -> None:
    card = open_model("scripted").card
    assert card.chat_template is not None
    messages = [
        {"role": "system", "content": "be brief. "},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ]
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(card.chat_template).render(
        messages=messages, add_generation_prompt=True, bos_token=card.bos_text
    )
    assert text == "<|bos|>be brief. onetwothree<|sep|>three"
    ids = load_tokenizer(card).encode(text, False)
    assert ids[0] == BOS_ID
    assert bytes(ids[ids.index(SEP_ID) + 1 :]) == b"three"


def test_scripted_model_has_no_weights() -> None:
    source = open_model("scripted")
    assert list(source.weights()) == []
    assert source.spec.num_layers == source.spec.kv_bytes_per_token == 0
    assert source.spec.name == "scripted"
    assert device_weights(source.spec).keys() == {"embed", "norm", "head"}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{}", "list of strings"),
        ('["a", 1]', "list of strings"),
        ('["a", ""]', "list of strings"),
        ('["a", "a"]', "twice"),
        ('["\\ud800"]', "surrogate"),
        ("[", "not a JSON file"),
        ("[" * 100000, "not a JSON file"),
    ],
)
def test_bad_string_files_are_one_sentence(tmp_path: Path, content: str, reason: str) -> None:
    file = tmp_path / "bad.json"
    file.write_text(content)
    with pytest.raises(ModelError, match=reason) as caught:
        open_model(f"scripted:{file}")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_string_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        open_model(f"scripted:{tmp_path / 'none.json'}")
