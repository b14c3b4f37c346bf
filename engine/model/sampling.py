"""Sampling: the next token of each row from its logits, with nothing shared between rows.

Order, as in vLLM: the request's biases, penalties (repetition over prompt and generated ids;
frequency and presence over generated ids), no EOS and none of its own stop ids before min_tokens,
temperature, min_p, top_k, top_p; each sees what the one before has kept.
The draw takes the row's own ``uniform`` through the inverse CDF of the kept probabilities in
descending order (ties: lower id first), so that a row's outcome depends on its own logits and
uniform alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.model.adjustments import NOTHING, Adjustments, read_adjustments
from engine.model.batch import Batch
from engine.state import RowFlag

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

INVALID_TOKEN = -1
"""Reported where a logit is not a number; the scheduler makes an error of it."""

_FLOORS = (1e-2, 1e-4)
"""Tokens this likely, relative to the likeliest, are sorted first: few, and mostly enough."""

_SMALLEST = np.finfo(np.float32).smallest_subnormal
"""A weight of zero is never drawn."""

_LARGEST = np.finfo(np.float32).max
"""No bias or penalty makes a logit larger: infinity has no distribution."""


def sample(
    logits: Floats,
    batch: Batch,
    history: Ints,
    results: npt.NDArray[Any],
    alternatives: npt.NDArray[Any],
    eos_ids: tuple[int, ...],
    records: npt.NDArray[np.uint8],
) -> None:
    """Choose a token for each sampled row; write ``results``, ``alternatives`` and ``history``.

    ``logits`` is float32[S, vocab], one row for each of ``batch.sampled``; ``records`` u8[num_seqs,
    slot_bytes]. The result's logprob is that of the raw distribution, log_softmax(logits)[token],
    before biases, penalties and temperature.
    So are those of the likeliest tokens, which rows with ALTERNATIVES get in ``alternatives``.
    A row without a proper distribution (NaN, infinity) gets token -1 and logprob NaN.
    """
    for own, index in zip(logits, batch.sampled, strict=True):
        row = batch.rows[index]
        position = int(batch.context_length[index])
        token, logprob = INVALID_TOKEN, float("nan")
        largest = own.max()
        if np.isfinite(largest):  # false if any logit is NaN
            known = history[int(row["seq"]), :position]
            adjustments = NOTHING
            if row["num_adjusted"]:
                adjustments = read_adjustments(records[int(row["seq"])])
            token = sample_row(own, row, known, eos_ids, adjustments)
        if token != INVALID_TOKEN:
            total = float(largest) + float(np.log(np.exp(own - largest).sum(dtype=np.float64)))
            logprob = float(own[token]) - total
            if int(row["flags"]) & RowFlag.ALTERNATIVES:
                write_likeliest(own, total, int(row["num_logprobs"]), alternatives[index])
        results["token"][index] = token
        results["logprob"][index] = logprob
        history[int(row["seq"]), position] = max(token, 0)


def write_likeliest(
    logits: Floats, total: float, count: int, alternatives: npt.NDArray[Any]
) -> None:
    """The ``count`` likeliest tokens in descending order, the lower id first of equals.

    ``total`` is the logarithm of the sum of the logits' exponentials. Where there are fewer tokens,
    the one behind the last is -1.
    """
    num_found = min(count, len(logits))
    least = np.partition(logits, -num_found)[-num_found]
    candidates = np.flatnonzero(logits >= least)
    ids = candidates[np.argsort(-logits[candidates], kind="stable")[:num_found]]
    alternatives["token"][:num_found] = ids
    alternatives["logprob"][:num_found] = logits[ids] - total
    alternatives["token"][num_found:count] = INVALID_TOKEN


def sample_row(
    logits: Floats,
    row: np.void,
    known: Ints,
    eos_ids: tuple[int, ...],
    adjustments: Adjustments = NOTHING,
) -> int:
    """The token of one row; ``known`` are its prompt's and generated ids so far.

    INVALID_TOKEN if nothing is left that may be sampled.
    """
    scores = _penalized(_biased(logits, adjustments), row, known)
    if int(row["flags"]) & RowFlag.SUPPRESS_STOP:
        scores = scores.copy()
        scores[list(eos_ids)] = -np.inf
        scores[adjustments.stop_ids] = -np.inf
    if scores is not logits:
        np.fmin(scores, _LARGEST, out=scores)
        if scores.max() == -np.inf:
            return INVALID_TOKEN
    if row["temperature"] <= 0:
        return int(scores.argmax())
    return _draw(scores, row)


def _biased(logits: Floats, adjustments: Adjustments) -> Floats:
    if not len(adjustments.bias_ids):
        return logits
    scores = logits.copy()
    last = dict(zip(adjustments.bias_ids.tolist(), adjustments.biases, strict=True))
    with np.errstate(over="ignore"):
        for token, bias in last.items():
            scores[token] = min(scores[token] + bias, _LARGEST)
    return scores


def _penalized(logits: Floats, row: np.void, known: Ints) -> Floats:
    repetition = np.float32(row["repetition_penalty"])
    frequency, presence = row["frequency_penalty"], row["presence_penalty"]
    repeats = repetition > 0 and repetition != 1
    if not (repeats or frequency or presence):
        return logits
    scores = logits.copy()
    known = np.clip(known, 0, len(scores) - 1)
    if repeats:
        seen = np.unique(known)
        values = scores[seen]
        with np.errstate(over="ignore"):
            scores[seen] = np.where(values > 0, values / repetition, values * repetition)
    if frequency or presence:
        generated, counts = np.unique(known[int(row["num_prompt_tokens"]) :], return_counts=True)
        scores[generated] -= frequency * counts.astype(np.float32) + presence
    return scores


def _draw(scores: Floats, row: np.void) -> int:
    """One draw for a row with a temperature above zero."""
    with np.errstate(over="ignore"):  # a tiny temperature: exp(-inf) is the right weight
        weights = np.exp((scores - scores.max()) / row["temperature"])
    min_p, top_p, uniform = float(row["min_p"]), float(row["top_p"]), float(row["uniform"])
    limit = int(row["top_k"]) if row["top_k"] > 0 else len(scores)
    for floor in (*_FLOORS, 0.0):
        likely = np.flatnonzero(weights >= max(floor, min_p, _SMALLEST))
        ids = _descending(weights, likely)[:limit]
        mass = weights[ids].cumsum(dtype=np.float64)
        # Whether ids are all that min_p and top_k keep, or only the likeliest of them.
        complete = floor <= min_p or len(ids) == limit
        total = mass[-1] if complete else _mass(weights, min_p)
        nucleus = total
        if 0 < top_p < 1:
            if not complete and mass[-1] < top_p * total:
                continue
            last = min(int(np.searchsorted(mass, top_p * total)), len(mass) - 1)
            mass, nucleus = mass[: last + 1], mass[last]
        if complete or uniform * nucleus < mass[-1]:
            index = int(np.searchsorted(mass, uniform * nucleus, side="right"))
            return int(ids[min(index, len(mass) - 1)])
    raise AssertionError("the last floor keeps everything")


def _descending(weights: Floats, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``ids`` by falling weight, then rising id: one sort of integers that hold both."""
    # The bits of floats that are not negative are in the order of their values.
    rank = np.uint32(0xFFFFFFFF) - weights[ids].view(np.uint32)
    keys = rank.astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _mass(weights: Floats, min_p: float) -> float:
    kept = weights[weights >= min_p] if min_p > 0 else weights
    return float(kept.sum(dtype=np.float64))
