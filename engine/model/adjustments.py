"""What a request's record adds to its logits: biases, and its own stop ids while it may not stop.

Only rows with `num_adjusted` have any; for all others nobody looks at the records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.protocol import RECORD

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Adjustments:
    """Ids are in the vocabulary: the scheduler judged the record."""

    stop_ids: npt.NDArray[np.uint32]
    bias_ids: npt.NDArray[np.uint32]
    biases: npt.NDArray[np.float32]
    """One per bias id. Of an id that is there twice the last one counts."""


NOTHING = Adjustments(np.zeros(0, np.uint32), np.zeros(0, np.uint32), np.zeros(0, np.float32))


def read_adjustments(record: Bytes) -> Adjustments:
    """Of one sequence's private record, u8[slot_bytes] (engine/protocol.py: RECORD)."""
    header = record[: RECORD.dtype.itemsize].view(RECORD.dtype)[0]
    words = record[RECORD.dtype.itemsize :].view(np.uint32)
    num_stops, num_biases = int(header["num_stop_token_ids"]), int(header["num_logit_bias"])
    pairs = words[num_stops : num_stops + 2 * num_biases]
    return Adjustments(words[:num_stops], pairs[::2], pairs[1::2].view(np.float32))
