"""Sampling keeps what its parameters say, and draws with the row's own number only."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.model.adjustments import Adjustments, read_adjustments
from engine.model.batch import Batch
from engine.model.sampling import INVALID_TOKEN, sample, sample_row
from engine.protocol import MAX_LOGPROBS
from engine.ring import Address, RequestParams, Ticket, encode_record
from engine.state import RESULT, ROW, RowFlag

NO_IDS = np.zeros(0, dtype=np.int32)


def row(**values: float) -> Any:
    one = np.zeros(1, dtype=ROW.dtype)[0]
    for key, value in {
        "temperature": 1.0,
        "top_p": 1.0,
        "repetition_penalty": 1.0,
        **values,
    }.items():
        one[key] = value
    return one


def logits_of(probabilities: list[float]) -> npt.NDArray[np.float32]:
    return np.log(np.asarray(probabilities, dtype=np.float32))


def kept(logits: npt.NDArray[np.float32], **values: float) -> dict[int, int]:
    """How often each token is drawn by 200 evenly spread uniforms."""
    counts: dict[int, int] = {}
    for uniform in (np.arange(200) + 0.5) / 200:
        token = sample_row(logits, row(uniform=uniform, **values), NO_IDS, ())
        counts[token] = counts.get(token, 0) + 1
    return counts


SIX = logits_of([0.1, 0.4, 0.05, 0.25, 0.05, 0.15])


def test_zero_temperature_takes_the_first_of_the_largest() -> None:
    logits = np.array([1.0, 3.0, 3.0, 2.0], dtype=np.float32)
    assert sample_row(logits, row(temperature=0.0, top_k=1, uniform=0.99), NO_IDS, ()) == 1


def test_draws_follow_the_probabilities() -> None:
    assert kept(SIX) == {1: 80, 3: 50, 5: 30, 0: 20, 2: 10, 4: 10}


def test_temperature_sharpens_and_flattens() -> None:
    squared = np.exp(2 * SIX.astype(np.float64))
    assert kept(SIX, temperature=0.5)[1] == pytest.approx(200 * 0.16 / squared.sum(), abs=1)
    assert kept(SIX, temperature=1e-6) == {1: 200}
    assert min(kept(SIX, temperature=1e6).values()) >= 33


@pytest.mark.parametrize(
    ("values", "tokens"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 5}),
        ({"top_k": 5}, {1, 3, 5, 0, 2}),  # of a tie the lower id
        ({"top_k": 100}, set(range(6))),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.79}, {1, 3, 5}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.3}, {1, 3, 5}),
        ({"min_p": 1.0}, {1}),
        ({"top_k": 3, "top_p": 0.6}, {1, 3}),  # 0.4 of the kept 0.8 is half: one more
        ({"min_p": 0.2, "top_p": 0.85}, {1, 3, 5}),
    ],
)
def test_filters_keep_the_likeliest(values: dict[str, float], tokens: set[int]) -> None:
    assert set(kept(SIX, **values)) == tokens


@pytest.mark.parametrize("seed", range(5))
def test_shortcut_over_common_tokens_equals_the_full_sort(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, rng.choice([0.1, 1, 4]), 5000).astype(np.float32)
    values: dict[str, Any] = {
        "temperature": float(rng.choice([0.5, 1.0, 2.0])),
        "top_p": float(rng.choice([0.3, 0.95, 1.0])),
        "top_k": int(rng.choice([0, 7, 3000])),
        "min_p": float(rng.choice([0.0, 0.02])),
    }
    for uniform in (0.0, 0.5, 0.999, float(np.nextafter(np.float32(1), np.float32(0)))):
        assert sample_row(logits, row(uniform=uniform, **values), NO_IDS, ()) == full_sort(
            logits, uniform, **values
        )


def full_sort(
    logits: npt.NDArray[np.float32],
    uniform: float,
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
) -> int:
    """The definition, without shortcuts."""
    weights = np.exp((logits - logits.max()) / np.float32(temperature))  # float32, as there
    order = np.argsort(-weights, kind="stable")
    order = order[weights[order] >= min_p]
    order = order[: top_k or len(order)]
    mass = weights[order].cumsum(dtype=np.float64)
    if top_p < 1:
        order = order[: int(np.searchsorted(mass, top_p * mass[-1])) + 1]
        mass = mass[: len(order)]
    chosen = int(np.searchsorted(mass, np.float32(uniform) * mass[-1], side="right"))
    return int(order[min(chosen, len(order) - 1)])


def test_penalties_act_on_their_own_ids() -> None:
    logits = np.array([2.0, -2.0, 1.0, 0.5, 3.0], dtype=np.float32)
    known = np.array([0, 1, 4, 4, 3], dtype=np.int32)
    greedy = {"temperature": 0.0, "num_prompt_tokens": 2}
    # Repetition sees prompt and output: 4 and 0 shrink to 0.75 and 0.5, 2 stays.
    assert sample_row(logits, row(repetition_penalty=4.0, **greedy), known, ()) == 2
    # Frequency and presence see the output 4, 4, 3 only.
    assert sample_row(logits, row(frequency_penalty=0.6, **greedy), known, ()) == 0
    assert sample_row(logits, row(presence_penalty=0.9, **greedy), known, ()) == 4
    assert sample_row(logits, row(presence_penalty=1.1, **greedy), known, ()) == 0
    assert (logits == [2.0, -2.0, 1.0, 0.5, 3.0]).all()


def test_suppressed_stops_are_not_sampled() -> None:
    flags = {"flags": int(RowFlag.SAMPLE | RowFlag.SUPPRESS_STOP)}
    assert sample_row(SIX, row(temperature=0.0, **flags), NO_IDS, (1,)) == 3
    assert sample_row(SIX, row(temperature=0.0), NO_IDS, (1,)) == 1


def test_own_stop_ids_are_suppressed_with_eos() -> None:
    flags = {"flags": int(RowFlag.SAMPLE | RowFlag.SUPPRESS_STOP)}
    stops = asked(stop_token_ids=(3, 5))
    assert sample_row(SIX, row(temperature=0.0, **flags), NO_IDS, (1,), stops) == 0
    assert sample_row(SIX, row(temperature=0.0), NO_IDS, (1,), stops) == 1
    drawn = {
        sample_row(SIX, row(uniform=uniform, **flags), NO_IDS, (1,), stops)
        for uniform in (np.arange(200) + 0.5) / 200
    }
    assert drawn == {0, 2, 4}


def test_a_bias_forbids_and_forces() -> None:
    greedy = row(temperature=0.0)
    assert sample_row(SIX, greedy, NO_IDS, (), asked(logit_bias=((1, -100),))) == 3
    assert sample_row(SIX, greedy, NO_IDS, (), asked(logit_bias=((4, 100),))) == 4
    both = asked(logit_bias=((1, -100), (3, -100)))
    drawn = {
        sample_row(SIX, row(uniform=uniform), NO_IDS, (), both)
        for uniform in (np.arange(200) + 0.5) / 200
    }
    assert drawn == {0, 2, 4, 5}


def test_of_an_id_with_two_biases_the_last_one_counts() -> None:
    greedy = row(temperature=0.0)
    assert sample_row(SIX, greedy, NO_IDS, (), asked(logit_bias=((4, 100), (4, -1)))) == 1
    assert sample_row(SIX, greedy, NO_IDS, (), asked(logit_bias=((4, -1), (4, 100)))) == 4


def test_biases_come_before_penalties() -> None:
    logits = np.array([1.0, 2.0, 1.5], dtype=np.float32)
    known = np.array([0], dtype=np.int32)
    greedy = row(temperature=0.0, repetition_penalty=2.0)
    # (1 + 3.5) / 2 = 2.25 is the largest; 1 / 2 + 3.5 would be, too, but (1 + 2.5) / 2 is not.
    assert sample_row(logits, greedy, known, (), asked(logit_bias=((0, 3.5),))) == 0
    assert sample_row(logits, greedy, known, (), asked(logit_bias=((0, 2.5),))) == 1


def test_nothing_that_may_be_sampled_gives_an_invalid_token() -> None:
    flags = {"flags": int(RowFlag.SAMPLE | RowFlag.SUPPRESS_STOP)}
    every = asked(stop_token_ids=tuple(range(6)))
    for temperature in (0.0, 1.0):
        one = row(temperature=temperature, uniform=0.5, **flags)
        assert sample_row(SIX, one, NO_IDS, (), every) == INVALID_TOKEN


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_numbers_beyond_the_largest_are_as_large(temperature: float) -> None:
    known = np.array([0, 3], dtype=np.int32)
    logits = np.array([30.0, -1.0, 2.0, 20.0], dtype=np.float32)
    one = row(temperature=temperature, repetition_penalty=1.2e-38, uniform=0.25)
    assert sample_row(logits, one, known, ()) == 0
    huge = asked(logit_bias=((2, 3.4e38), (1, 3.4e38)))
    assert sample_row(logits, row(temperature=temperature), NO_IDS, (), huge) == 1


def asked(**values: Any) -> Adjustments:
    """What the samplers read of a record with these parameters."""
    return read_adjustments(record_of(**values))


def record_of(**values: Any) -> npt.NDArray[np.uint8]:
    params = RequestParams(**values)
    encoded = encode_record(params, [1, 2, 3], Address(1, 1), 1, Ticket(0, 1))
    return np.frombuffer(encoded, dtype=np.uint8)


def batch_of(rows: list[Any]) -> Batch:
    table = np.array(rows, dtype=ROW.dtype)
    table["seq"] = table["query_start"] = index = np.arange(len(rows))
    ones = np.ones(len(rows), dtype=np.int64)
    return Batch(table, index, ones, ones, ones, index, ones, ones, index, index)


def run(
    logits: npt.NDArray[np.float32], rows: list[Any], records: Any = None, alternatives: Any = None
) -> tuple[Any, npt.NDArray[np.int32]]:
    results = np.zeros(len(rows), dtype=RESULT.dtype)
    history = np.zeros((len(rows), 4), dtype=np.int32)
    if alternatives is None:
        alternatives = np.zeros((len(rows), MAX_LOGPROBS), dtype=RESULT.dtype)
    sample(logits, batch_of(rows), history, results, alternatives, (), records)
    return results, history


def test_result_does_not_depend_on_batch_mates() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (8, 1000)).astype(np.float32)
    rows = [row(temperature=0.3 * i, top_k=i * 9, uniform=i / 8) for i in range(8)]
    together, history = run(logits, rows)
    assert (history[:, 1] == together["token"]).all()
    for index in range(8):
        alone, _ = run(logits[index : index + 1], [rows[index]])
        assert alone[0] == together[index]


def test_logprob_is_of_the_raw_distribution() -> None:
    results, _ = run(SIX[None], [row(temperature=0.2, top_k=1)])
    assert results["logprob"][0] == pytest.approx(np.log(0.4), abs=1e-6)


def test_only_rows_that_say_so_are_adjusted() -> None:
    records = np.stack([record_of(logit_bias=((4, 100),))] * 2)
    rows = [row(temperature=0.0, num_adjusted=1), row(temperature=0.0)]
    results, _ = run(np.stack([SIX, SIX]), rows, records)
    assert results["token"].tolist() == [4, 1]
    assert results["logprob"] == pytest.approx(np.log([0.05, 0.4]), abs=1e-6)


def likeliest(logits: npt.NDArray[np.float32], count: int, **values: Any) -> list[Any]:
    """(token, logprob) of the alternatives of a row that also has what `values` say."""
    alternatives = np.zeros((1, MAX_LOGPROBS), dtype=RESULT.dtype)
    flags = int(RowFlag.SAMPLE | RowFlag.ALTERNATIVES)
    run(logits[None], [row(num_logprobs=count, flags=flags, **values)], None, alternatives)
    found: list[Any] = alternatives[0].tolist()
    return found[:count]


def test_alternatives_are_the_likeliest_of_the_raw_distribution() -> None:
    found = likeliest(SIX, 5, temperature=2.0, top_k=1, presence_penalty=2.0)
    assert [token for token, _ in found] == [1, 3, 5, 0, 2]  # of a tie the lower id
    wanted = np.log([0.4, 0.25, 0.15, 0.1, 0.05])
    assert [logprob for _, logprob in found] == pytest.approx(wanted, abs=1e-6)


def test_where_there_are_fewer_tokens_the_list_ends() -> None:
    found = likeliest(SIX, 20)
    assert [token for token, _ in found[:7]] == [1, 3, 5, 0, 2, 4, INVALID_TOKEN]


def test_alternatives_of_a_flat_distribution_are_the_lowest_ids() -> None:
    found = likeliest(np.zeros(1000, dtype=np.float32), 20)
    assert [token for token, _ in found] == list(range(20))


def test_who_wants_no_alternatives_gets_none() -> None:
    untouched = np.zeros((1, MAX_LOGPROBS), dtype=RESULT.dtype)
    untouched["token"] = -7
    run(SIX[None], [row(num_logprobs=0, flags=int(RowFlag.SAMPLE))], None, untouched)
    assert (untouched["token"] == -7).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_not_numbers_give_an_invalid_token(bad: float) -> None:
    logits = np.stack([SIX, SIX])
    logits[0, 4] = bad
    results, history = run(logits, [row(), row(temperature=0.0)])
    assert results["token"].tolist() == [INVALID_TOKEN, 1]
    assert np.isnan(results["logprob"][0])
    assert history[0, 1] == 0


def test_nothing_but_minus_infinity_gives_an_invalid_token() -> None:
    results, _ = run(np.full((1, 6), -np.inf, dtype=np.float32), [row()])
    assert results["token"][0] == INVALID_TOKEN
