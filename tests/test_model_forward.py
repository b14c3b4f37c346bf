"""Forward passes agree with transformers' float32, and a row's bits with no one else's doing."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.model.source import ModelSource, open_model
from tests.model_driver import Driver, Sequence
from tests.model_files import LLAMA3_ROPE, random_model, save_folder, save_gguf

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-scaled": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-odd-heads": ("Llama", {"head_dim": 12}),
    "mistral": ("Mistral", {"num_key_value_heads": 1}),
    "qwen2": ("Qwen2", {"num_key_value_heads": 4}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
PROMPT = [int(token) for token in np.random.default_rng(3).integers(3, 320, 90)]


def make_driver(source: ModelSource, **options: Any) -> Driver:
    assert source.read is not None
    return Driver(source.spec, source.read, **options)


def expected_logprobs(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    result: np.ndarray[Any, Any] = torch.log_softmax(logits, dim=-1).numpy()
    return result


def assert_as_transformers(driver: Driver, model: Any) -> None:
    sequence = Sequence(PROMPT, max_tokens=20)
    driver.run([sequence], chunk=32)
    expected = expected_logprobs(model, PROMPT + sequence.output)
    for step, (token, logprob) in enumerate(zip(sequence.output, sequence.logprobs, strict=True)):
        row = expected[len(PROMPT) + step - 1]
        assert row[token] >= row.max() - 1e-3
        assert logprob == pytest.approx(row[token], abs=2e-4)


@pytest.mark.parametrize("plain_torch", [False, True], ids=["native", "torch"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_folder_gives_transformers_results(tmp_path: Path, variant: str, plain_torch: bool) -> None:
    architecture, changes = VARIANTS[variant]
    model = random_model(architecture, **changes)
    source = open_model(str(save_folder(model, tmp_path, max_shard_size="20KB")))
    assert_as_transformers(make_driver(source, plain_torch=plain_torch, page_size=8), model)


@pytest.mark.parametrize("plain_torch", [False, True], ids=["native", "torch"])
def test_alternatives_are_transformers_likeliest(tmp_path: Path, plain_torch: bool) -> None:
    model = random_model("Llama")
    source = open_model(str(save_folder(model, tmp_path)))
    asking = Sequence(PROMPT, max_tokens=10, parameters={"num_logprobs": 20, "temperature": 1.0})
    mate = Sequence(PROMPT[5:], max_tokens=10)
    asking.uniforms = np.random.default_rng(1).random(10).tolist()
    make_driver(source, plain_torch=plain_torch).run([mate, asking])
    expected = expected_logprobs(model, PROMPT + asking.output)[len(PROMPT) - 1 :]
    for row, token, logprob, found in zip(
        expected, asking.output, asking.logprobs, asking.alternatives, strict=False
    ):
        ids, values = [one for one, _ in found], [value for _, value in found]
        assert logprob == pytest.approx(row[token], abs=2e-4)
        assert values == pytest.approx(row[ids], abs=2e-4)
        assert values == pytest.approx(np.sort(row)[:-21:-1], abs=2e-4)
        assert len(set(ids)) == 20
    assert len(asking.alternatives) == 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_files_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    model = random_model("Llama")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    source = open_model(str(save_folder(copy.deepcopy(model).to(dtype), tmp_path)))
    assert_as_transformers(make_driver(source), model)


def test_gguf_gives_transformers_results(tmp_path: Path) -> None:
    model = random_model("Llama")
    source = open_model(str(save_gguf(model, tmp_path / "tiny.gguf")))
    assert_as_transformers(make_driver(source), model)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("tiny")
    return open_model(str(save_folder(random_model("Qwen3", hidden_size=40), folder)))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_batch_chunks_and_threads_do_not_change_a_bit(tiny: ModelSource, num_threads: int) -> None:
    alone = Sequence(PROMPT, max_tokens=12)
    make_driver(tiny, num_threads=2).run([alone])
    for chunk in (0, 1, 5, 64):
        prompts = [PROMPT[index:] + PROMPT[:index] for index in range(8)]
        batch = [Sequence(prompt, 12, arrival_step=i % 3) for i, prompt in enumerate(prompts)]
        make_driver(tiny, num_threads=num_threads).run(batch, chunk=chunk)
        assert batch[0].output == alone.output
        assert batch[0].logprobs == alone.logprobs


def test_pages_that_nobody_wrote_are_not_read(tiny: ModelSource) -> None:
    driver = make_driver(tiny, num_seqs=3)
    sequences = [Sequence(PROMPT[:length], max_tokens=3) for length in (1, 16, 33)]
    driver.run(sequences)
    assert all(np.isfinite(sequence.logprobs).all() for sequence in sequences)
    used = np.isfinite(driver.kv_cache[0, 0, :, :, 0, 0]).sum()
    assert used == sum(sequence.computed for sequence in sequences)


def test_token_ids_out_of_the_vocabulary_are_clamped(tiny: ModelSource) -> None:
    driver = make_driver(tiny)
    sequence = Sequence([5, -1, 2**31 - 1, 320, 7], max_tokens=2)
    driver.run([sequence])
    assert all(0 <= token < tiny.spec.vocab_size for token in sequence.output)


def test_broken_weights_report_an_invalid_token(tiny: ModelSource) -> None:
    driver = make_driver(tiny)
    healthy, broken = Sequence(PROMPT, 2), Sequence(PROMPT, 2)
    driver.run([healthy])
    driver.step([(0, broken, len(PROMPT) - 1)])
    driver.kv_cache[:, :, driver.block_tables[0, 0]] = np.nan
    driver.step([(0, broken, 1)])
    assert broken.output == [-1]
    assert np.isnan(broken.logprobs[0])


def test_wrong_weight_arrays_are_refused(tiny: ModelSource) -> None:
    driver = make_driver(tiny)
    name = np.frombuffer(b"norm", dtype=np.uint8)
    with pytest.raises(ValueError, match="norm"):
        driver.program.add_weight(name, np.zeros(41, dtype=np.float32))
