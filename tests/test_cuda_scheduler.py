"""The scheduler on a real GPU makes the plans that the host's makes."""

from __future__ import annotations

import pytest

cupy = pytest.importorskip("cupy", reason="needs CuPy and a CUDA GPU")


def _has_gpu() -> bool:
    try:
        return int(cupy.cuda.runtime.getDeviceCount()) > 0
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


pytestmark = pytest.mark.skipif(not _has_gpu(), reason="needs a CUDA GPU")


@pytest.mark.parametrize("seed", range(8))
def test_random_traces_give_the_hosts_plans(seed: int) -> None:
    from tests.cuda_turn import run_trace

    assert run_trace(seed, num_steps=60) > 60
