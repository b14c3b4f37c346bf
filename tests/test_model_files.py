"""Model files that are missing, damaged or of another kind end in one clear sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from engine.model.source import open_model
from engine.model.spec import ModelError, ModelSpec, device_weights
from tests.model_files import random_model, save_folder, save_gguf


def refusal(model: Path | str) -> str:
    """The sentence with which a model is refused, when opened or when its weights are read."""
    with pytest.raises(ModelError) as caught:
        list(open_model(str(model)).weights())
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_unknown_name_lists_what_is_possible() -> None:
    assert "smollm2, scripted" in refusal("no-such-model")


def test_other_file_is_not_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"PK\x03\x04" * 9)
    assert "not a GGUF file" in refusal(tmp_path / "x.bin")
    (tmp_path / "empty").touch()
    assert "not a GGUF file" in refusal(tmp_path / "empty")


def test_folder_without_a_model(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)


@pytest.fixture(scope="module")
def whole_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return save_gguf(random_model("Llama"), tmp_path_factory.mktemp("g") / "m.gguf").read_bytes()


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.05, 0.2, 0.5, 0.99])
def test_truncated_gguf(tmp_path: Path, whole_gguf: bytes, share: float) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole_gguf[: max(5, int(len(whole_gguf) * share))])
    assert "truncated or damaged" in refusal(path)


def test_damaged_gguf_never_gives_another_error(tmp_path: Path, whole_gguf: bytes) -> None:
    rng = np.random.default_rng(1)
    path = tmp_path / "damaged.gguf"
    for _ in range(60):
        data = bytearray(whole_gguf)
        for position in rng.integers(4, 3000, 3):
            data[position] = int(rng.integers(0, 256))
        path.write_bytes(data)
        try:
            list(open_model(str(path)).weights())
        except ModelError as error:
            assert "\n" not in str(error)  # noqa: PT017, a damage may also go unseen


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "g.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "'gpt2' is not supported" in refusal(tmp_path / "g.gguf")


def test_gguf_without_tokenizer(tmp_path: Path) -> None:
    path = save_gguf(random_model("Llama"), tmp_path / "m.gguf", tokens=False)
    assert "no tokenizer" in refusal(path)


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def cut(name: str, size: int) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return edit


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (remove("model.safetensors"), "no safetensors"),
        (remove("tokenizer.json"), r"no readable tokenizer\.json"),
        (cut("model.safetensors", 5), "truncated or damaged"),
        (cut("model.safetensors", 5000), "truncated or damaged"),
        (cut("config.json", 50), "cannot be read as JSON"),
        (edit_config(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not supported"),
        (edit_config(architectures=None), "none is not supported"),
        (edit_config(hidden_size="many"), "hidden_size='many' is not a number"),
        (edit_config(num_hidden_layers=3), "tensors are missing"),
        (edit_config(intermediate_size=80), "has shape"),
        (edit_config(num_attention_heads=5), "cannot be shared"),
        (edit_config(hidden_act="gelu"), "hidden_act='gelu'"),
        (edit_config(rope_parameters={"rope_type": "yarn", "factor": 2.0}), "'yarn'"),
        (edit_config(rope_parameters={"rope_type": "llama3"}), "KeyError: 'factor'"),
        (edit_config(rope_parameters=7), "damaged"),
        (edit_config(use_sliding_window=True, sliding_window=16), "sliding window of 16"),
    ],
)
def test_damaged_folders(tmp_path: Path, damage: Callable[[Path], None], reason: str) -> None:
    folder = save_folder(random_model("Llama"), tmp_path)
    damage(folder)
    assert re.search(reason, refusal(folder))


def test_missing_shard(tmp_path: Path) -> None:
    folder = save_folder(random_model("Llama"), tmp_path, max_shard_size="20KB")
    sorted(folder.glob("model-*.safetensors"))[-1].unlink()
    assert "is missing" in refusal(folder)


def test_weights_that_are_not_finite(tmp_path: Path) -> None:
    model = random_model("Llama")
    model.model.norm.weight.data[3] = float("nan")
    assert "not finite" in refusal(save_folder(model, tmp_path))


def test_mistral_window_as_long_as_the_context_is_no_window(tmp_path: Path) -> None:
    model = random_model("Mistral", sliding_window=256)
    assert open_model(str(save_folder(model, tmp_path))).spec.max_context == 256


def test_weights_come_with_the_announced_shapes(tmp_path: Path) -> None:
    source = open_model(str(save_folder(random_model("Qwen2"), tmp_path)))
    weights = dict(source.weights())
    assert {name: weight.shape for name, weight in weights.items()} == device_weights(source.spec)
    assert sum(weight.nbytes for weight in weights.values()) == source.spec.weights_bytes
    assert all(weight.dtype == np.float32 for weight in weights.values())
    assert ModelSpec.from_json(source.spec.to_json()) == source.spec
