"""The pace of a GPU: how long it takes for a step, by a profile of `blinkbed calibrate`.

    step_ns = base_ns[bucket] + ns_per_decode_context * cached tokens that the decode rows read
              + ns_per_prefill_pair * pairs of a prompt's token and one that it sees
              + ns_per_prefill_context * tokens that the prompts' last tokens see

The bucket is the narrowest that holds the step's tokens: the graph that a real GPU would run.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from engine.model.spec import ModelError

PROFILES = Path(__file__).parents[1] / "profiles"
MAX_BUCKETS = 32
PACE = np.dtype(
    [
        ("num_buckets", "<i4"),
        ("reserved", "<i4"),
        ("buckets", "<i4", MAX_BUCKETS),
        ("base_ns", "<f8", MAX_BUCKETS),
        ("ns_per_decode_context", "<f8"),
        ("ns_per_prefill_pair", "<f8"),
        ("ns_per_prefill_context", "<f8"),
    ]
)
"""engine/csrc/paced.cuh: Pace."""
TERMS = ("ns_per_decode_context", "ns_per_prefill_pair", "ns_per_prefill_context")


@dataclass(frozen=True, slots=True)
class Pace:
    """A profile's numbers. Times in nanoseconds, buckets in tokens, ascending."""

    name: str
    hardware: str
    measured: bool
    date: str
    buckets: tuple[int, ...]
    base_ns: tuple[float, ...]
    ns_per_decode_context: float
    ns_per_prefill_pair: float
    ns_per_prefill_context: float

    @classmethod
    def load(cls, name: str) -> Self:
        """A shipped profile by its name, or a file; raises ModelError in one sentence."""
        shipped = PROFILES / f"{name}.json"
        path = shipped if shipped.is_file() else Path(name).expanduser()
        if not path.is_file():
            known = ", ".join(sorted(one.stem for one in PROFILES.glob("*.json")))
            raise ModelError(f"no profile {name!r}: neither a file nor one of {known}.")
        try:
            return cls._from_mapping(path.stem, json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(
                f"{path} is not a profile of blinkbed calibrate ({type(error).__name__}: {error})."
            ) from error

    @classmethod
    def _from_mapping(cls, name: str, fields: dict[str, Any]) -> Self:
        buckets = tuple(int(one) for one in fields["buckets"])
        base_ns = tuple(float(one) for one in fields["base_ns"])
        terms = {term: float(fields[term]) for term in TERMS}
        if not 1 <= len(buckets) <= MAX_BUCKETS or len(buckets) != len(base_ns):
            raise ValueError(f"there are {len(buckets)} buckets and {len(base_ns)} times")
        if list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
            raise ValueError("buckets must ascend from 1 or more")
        if not all(0 <= value < 1e12 for value in (*base_ns, *terms.values())):
            raise ValueError("a time is negative, or longer than a quarter of an hour")
        return cls(
            name, str(fields["hardware"]), bool(fields["measured"]), str(fields["date"]),
            buckets, base_ns, **terms,
        )  # fmt: skip

    def to_struct(self) -> np.ndarray:
        """For the device: PACE, shape [1]."""
        struct = np.zeros(1, PACE)
        one = struct[0]
        one["num_buckets"] = len(self.buckets)
        one["buckets"][: len(self.buckets)] = self.buckets
        one["base_ns"][: len(self.base_ns)] = self.base_ns
        for term in TERMS:
            one[term] = getattr(self, term)
        return struct
