"""The real model through the whole stack: the tokens are the reference's, and keep coming."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from compose.fault import DEFAULT, FAULTS, heal, is_frozen
from compose.stack import ContainerStack
from tests.e2e.client import Traffic, run_streams

REFERENCE: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "reference" / "smollm2_greedy.json").read_text()
)
FROZEN_S = 10.0
LONGEST_PAUSE_S = 3.0  # of any of four streams on a CPU that everything else shares


@pytest.mark.parametrize("expected", REFERENCE, ids=lambda entry: entry["prompt"][:24])
def test_greedy_ids_equal_the_reference(smollm2: ContainerStack, expected: dict[str, Any]) -> None:
    num_tokens = expected["safe_tokens"]
    body = {"prompt": expected["prompt_ids"], "temperature": 0, "max_tokens": num_tokens}
    (reply,) = run_streams(smollm2.url, [body])
    assert reply.token_ids == expected["output_ids"][:num_tokens]
    assert len(reply.ends) == 1


def test_tokens_keep_coming_while_the_host_is_frozen(smollm2: ContainerStack) -> None:
    prompt = REFERENCE[0]["prompt_ids"]
    body = {"prompt": prompt, "temperature": 0, "max_tokens": 64, "ignore_eos": True}
    with Traffic(smollm2.url, lambda number: body, num_clients=4) as traffic:
        FAULTS["host-frozen"].apply(smollm2, DEFAULT)
        began = time.monotonic()
        try:
            while time.monotonic() < began + FROZEN_S:
                assert is_frozen(smollm2.container("host"))
                time.sleep(0.5)
            ended = time.monotonic()
        finally:
            heal(smollm2)
    assert all(reply.ends == ["length"] for reply in traffic.replies)
    assert len({tuple(reply.token_ids) for reply in traffic.replies}) == 1
    when = sorted(moment for reply in traffic.replies for moment in reply.arrivals_s)
    frozen = [began, *(moment for moment in when if began < moment < ended), ended]
    longest_s = max(after - before for before, after in itertools.pairwise(frozen))
    assert longest_s < LONGEST_PAUSE_S
