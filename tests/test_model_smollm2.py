"""The default model gives the reference's greedy ids, however its requests are batched."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest

from engine.model.source import ModelSource, open_model
from engine.model.spec import ModelError
from engine.model.tokenizer import load_tokenizer
from tests.model_driver import Driver, Sequence

REFERENCE = Path(__file__).parent / "reference" / "smollm2_greedy.json"
"""Made by transformers from the same file: prompts, greedy ids, and how many of them are safe,
that is, chosen by a margin that float32 rounding cannot turn."""


@functools.cache
def reference() -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(REFERENCE.read_text())
    return entries


@pytest.fixture(scope="module")
def source() -> ModelSource:
    try:
        return open_model("smollm2")
    except ModelError as error:
        pytest.skip(f"the default model cannot be had: {error}")


@pytest.fixture(scope="module")
def driver(source: ModelSource) -> Driver:
    assert source.read is not None
    return Driver(source.spec, source.read)


def requests(stagger: int = 0) -> list[Sequence]:
    return [
        Sequence(entry["prompt_ids"], entry["safe_tokens"], arrival_step=index * stagger)
        for index, entry in enumerate(reference())
    ]


def assert_reference(sequences: list[Sequence]) -> None:
    for sequence, entry in zip(sequences, reference(), strict=True):
        count = entry["safe_tokens"]
        assert sequence.output == entry["output_ids"][:count]
        assert sequence.logprobs == pytest.approx(entry["logprobs"][:count], abs=1e-3)


def test_prompts_alone_give_the_reference(driver: Driver) -> None:
    sequences = requests()
    for sequence in sequences:
        driver.run([sequence])
    assert_reference(sequences)


@pytest.mark.parametrize("chunk", [0, 7])
def test_staggered_batch_gives_the_reference(driver: Driver, chunk: int) -> None:
    sequences = requests(stagger=3)
    driver.run(sequences, chunk=chunk)
    assert_reference(sequences)


def test_preempted_prompts_recompute_to_the_reference(driver: Driver) -> None:
    sequences = requests()
    halves = [Sequence(s.prompt, (s.max_tokens + 1) // 2) for s in sequences]
    driver.run(halves)
    driver.kv_cache.fill(float("nan"))  # the pages went to others
    for sequence, half in zip(sequences, halves, strict=True):
        sequence.output, sequence.logprobs = half.output, half.logprobs
    driver.run(sequences, chunk=16)
    assert_reference(sequences)


def test_schedules_do_not_change_a_bit(driver: Driver) -> None:
    alone, batched = requests()[2], requests()
    driver.run([alone], chunk=5)
    driver.run(batched)
    assert batched[2].output == alone.output
    assert batched[2].logprobs == alone.logprobs


def test_tokenizer_encodes_the_reference_prompts(source: ModelSource) -> None:
    tokenizer = load_tokenizer(source.card)
    for entry in reference():
        assert tokenizer.encode(entry["text"], True) == entry["prompt_ids"]
        ids = [token for token in entry["output_ids"] if token not in tokenizer.eos_ids]
        assert tokenizer.decode(ids) == entry["output_text"]


def test_chat_template_renders_the_reference_text(source: ModelSource) -> None:
    assert source.card.chat_template is not None
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(source.card.chat_template)
    for entry in reference():
        if entry["kind"] == "chat":
            messages = [{"role": "user", "content": entry["prompt"]}]
            text = template.render(messages=messages, add_generation_prompt=True)
            assert text == entry["text"]
