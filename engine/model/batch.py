"""One step's rows, unpacked for the model: which token is where, and what each row may see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.state import RowFlag

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's work. T tokens in R rows; tables are int64 unless said otherwise."""

    rows: npt.NDArray[Any]
    """ROW[R] (engine/state.py)."""
    seq: Ints
    """[R] row of the history and the block tables."""
    token_ids: Ints
    """[T] inputs; a row's are consecutive."""
    positions: Ints
    """[T] place in the sequence, from 0."""
    kv_index: Ints
    """[T] where the token's keys and values go: page * page_size + offset."""
    query_start: Ints
    """[R] first token of each row."""
    query_length: Ints
    """[R] tokens of each row in this step."""
    context_length: Ints
    """[R] tokens of each row's sequence after this step."""
    sampled: Ints
    """[S] rows that sample after their last token."""
    last_token: Ints
    """[S] index on the token axis of that last token."""

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


def read_batch(
    plan: npt.NDArray[Any],
    rows: npt.NDArray[Any],
    history: npt.NDArray[np.int32],
    block_tables: npt.NDArray[np.int32],
    page_size: int,
    vocab_size: int,
) -> Batch:
    """Unpack a plan. Token ids out of the vocabulary are clamped, never trusted."""
    used = rows[: int(plan["num_rows"].reshape(-1)[0])].copy()
    length = used["num_tokens"].astype(np.int64)
    first = used["first_position"].astype(np.int64)
    seq = used["seq"].astype(np.int64)
    start = used["query_start"].astype(np.int64)
    row_of_token = np.repeat(np.arange(len(used)), length)
    offset = np.arange(len(row_of_token)) - np.repeat(np.cumsum(length) - length, length)
    positions = first[row_of_token] + offset
    seq_of_token = seq[row_of_token]
    token_ids = history[seq_of_token, positions].astype(np.int64)
    pages = block_tables[seq_of_token, positions // page_size].astype(np.int64)
    sampled = np.flatnonzero(used["flags"] & np.uint32(RowFlag.SAMPLE))
    return Batch(
        rows=used,
        seq=seq,
        token_ids=np.clip(token_ids, 0, vocab_size - 1),
        positions=positions,
        kv_index=pages * page_size + positions % page_size,
        query_start=start,
        query_length=length,
        context_length=first + length,
        sampled=sampled,
        last_token=start[sampled] + length[sampled] - 1,
    )
