"""The scheduler in virtual time: what paths cost, what is hidden, and that every token comes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine import cli
from engine.config import RingConfig, SchedulerConfig
from engine.errors import UserError
from engine.model.pace import Pace
from engine.simulate.costs import KINDS, SHIPPED, Costs, Samples, no_costs
from engine.simulate.simulation import DEPTHS, Result, Setup, simulate
from engine.workload import Requests, lengths, poisson_requests

STEP_NS = 1_000_000
FLAT = Pace("flat", "a test", False, "-", (4096,), (float(STEP_NS),), 0.0, 0.0, 0.0)
RING = RingConfig(num_slots=64, token_ring_entries=4096)
SCHEDULER = SchedulerConfig(
    num_pages=4096, max_running=32, max_step_tokens=512, max_context=2048, debug=True
)


def costs(**kinds: int) -> Samples:
    table = no_costs()
    for kind, ns in kinds.items():
        table[KINDS.index(kind)] = ns
    return table


def run(
    path: str, requests: Sequence[Requests], *, costs: Samples | None = None, **changes: Any
) -> Result:
    setup: dict[str, Any] = {"ring": RING, "scheduler": SCHEDULER, "pace": FLAT, **changes}
    return simulate(Setup(path, costs=no_costs() if costs is None else costs, **setup), requests)


def streams(count: int, num_output: int, arrival_s: Sequence[float] | None = None) -> Requests:
    times = np.zeros(count) if arrival_s is None else np.array(arrival_s, np.float64)
    return Requests(times, np.full(count, 5, np.int32), np.full(count, num_output, np.int32))


def load(count: int, rate_per_s: float = 100.0) -> list[Requests]:
    return list(poisson_requests(rate_per_s, count, 1, max_context=1024))


def test_without_costs_the_host_may_as_well_drive() -> None:
    persistent, sync = (run(path, load(500)).to_mapping() for path in ("persistent", "sync"))
    assert persistent.pop("path") != sync.pop("path")
    assert persistent == sync
    assert persistent["gap_share"] == 0


@pytest.mark.parametrize("path", DEPTHS)
def test_every_token_of_every_request_comes(path: str) -> None:
    result = run(path, load(2000), costs=costs(turn_ns=20_000, launch_ns=50_000))
    wanted = lengths(2000, 1, max_context=1024)
    assert result.num_requests == result.ttft_ms["count"] == 2000
    assert result.num_tokens == wanted[:, 1].sum()
    assert result.itl_ms["count"] == result.num_tokens - 2000
    assert result.tpot_ms["count"] == (wanted[:, 1] > 1).sum()


def test_the_times_of_one_request_are_those_of_its_steps() -> None:
    extra = costs(turn_ns=7_000, extra_ns=3_000)
    alone = [streams(3, 11, [0.1, 0.3, 0.5])]
    result = run("persistent", alone, costs=extra)
    assert result.num_steps == 33
    assert result.ttft_ms["max"] == 1.01
    assert result.itl_ms["max"] == 1.01
    assert result.tpot_ms["p50"] == pytest.approx(1.01, rel=0.002)
    assert result.seconds == pytest.approx(0.4 + 11 * 0.00101)
    with_work_s = 33 * 0.00101
    assert result.gap_share == pytest.approx(33 * 7e-6 / with_work_s, abs=1e-6)
    far = run("persistent", alone, costs=extra, link_us=250.0)
    assert far.ttft_ms["max"] == 1.51
    assert far.itl_ms["max"] == 1.01


@pytest.mark.parametrize(
    ("path", "kinds", "itl_ns"),
    [
        ("sync", {"settle_ns": 1000, "turn_ns": 2000, "launch_ns": 4000}, STEP_NS + 7000),
        ("async", {"settle_ns": 1000, "turn_ns": 2000, "launch_ns": 4000}, STEP_NS),
        ("async", {"turn_ns": 900_000, "gap_ns": 5000}, STEP_NS + 5000),
        ("async", {"turn_ns": 1_500_000}, 1_500_000),  # the host has become the slower one
    ],
)
def test_a_path_shows_of_its_costs_what_it_does_not_hide(
    path: str, kinds: dict[str, int], itl_ns: int
) -> None:
    result = run(path, [streams(32, 200)], costs=costs(**kinds))
    assert result.itl_ms["p50"] == pytest.approx(itl_ns / 1e6, rel=0.002)
    assert result.gap_share == pytest.approx(1 - STEP_NS / itl_ns, abs=0.01)


def test_an_end_that_nobody_foresees_costs_async_a_row() -> None:
    rows = {}
    for path in DEPTHS:
        for ends_by_eos in (False, True):
            result = run(path, [streams(8, 50)], ends_by_eos=ends_by_eos)
            assert result.num_tokens == 400
            rows[path, ends_by_eos] = round(result.mean_rows * result.num_steps)
    assert rows["persistent", False] == rows["persistent", True] == rows["sync", True] == 400
    assert rows["async", False] == 400
    assert rows["async", True] == 408


@pytest.mark.parametrize("path", DEPTHS)
def test_preempted_requests_lose_nothing(path: str) -> None:
    small = SCHEDULER.replace(num_pages=40)
    result = run(path, [streams(16, 100)], scheduler=small)
    assert result.num_preemptions > 0
    assert result.num_tokens == 1600


@pytest.mark.parametrize("path", DEPTHS)
def test_pieces_of_a_load_are_the_load(path: str) -> None:
    (whole,) = load(1500)
    some = costs(turn_ns=20_000, settle_ns=100_000)
    pieces = [
        Requests(whole.arrival_s[at:end], whole.prompt_tokens[at:end], whole.output_tokens[at:end])
        for at, end in ((0, 1), (1, 900), (900, 900), (900, 1500))
    ]
    assert run(path, pieces, costs=some) == run(path, [whole], costs=some)


def test_more_requests_than_slots_wait_before_the_ring() -> None:
    few = run("persistent", [streams(64, 20)])
    many = run("persistent", [streams(100, 20)])
    assert few.num_delayed == 0
    assert many.num_delayed == 36
    assert many.num_tokens == 2000


def test_costs_are_drawn_from_their_distribution() -> None:
    known = Costs("x", "w", "h", "-", (0, 50, 100), {"sync": {"turn_ns": (0, 100_000, 500_000)}})
    table = known.samples("sync")
    turn = KINDS.index("turn_ns")
    assert np.percentile(table[turn], [25, 75]) == pytest.approx([50_000, 300_000], rel=0.01)
    assert not table[[one for one in range(len(KINDS)) if one != turn]].any()
    result = run("sync", [streams(1, 2000)], costs=table)
    drawn_ms = result.itl_ms["mean"] - STEP_NS / 1e6
    assert drawn_ms == pytest.approx(table[turn].mean() / 1e6, rel=0.05)
    assert result != run("sync", [streams(1, 2000)], costs=table, seed=2)
    with pytest.raises(UserError, match="path async"):
        known.samples("async")


def test_costs_go_through_a_file(tmp_path: Path) -> None:
    known = Costs("x", "w", "h", "-", (0, 100), {"sync": {"turn_ns": (1, 2)}, "persistent": {}})
    file = tmp_path / "x.json"
    file.write_text(known.to_json())
    assert Costs.load(str(file)) == known
    for wrong, words in (
        ({"paths": {"sync": {"turn_us": [1, 2]}}}, "turn_us"),
        ({"paths": {"sync": {"turn_ns": [2, 1]}}}, "ascend"),
        ({"paths": {"sync": {"turn_ns": [1]}}}, "1 values"),
        ({"percent": [3, 1]}, "percent"),
        ({"paths": []}, "costs of control paths"),
    ):
        file.write_text(json.dumps({**json.loads(known.to_json()), **wrong}))
        with pytest.raises(UserError, match=words):
            Costs.load(str(file))
    with pytest.raises(UserError, match=r"one of .*sim"):
        Costs.load("none-such")


def test_shipped_costs_load() -> None:
    assert set(Costs.load("sim").paths) == set(DEPTHS)
    for file in SHIPPED.glob("*.json"):
        shipped = Costs.load(file.stem)
        assert shipped.paths
        assert all(shipped.samples(path).any() for path in shipped.paths)


def test_what_cannot_be_served_is_said() -> None:
    with pytest.raises(UserError, match="1 of 2 requests were refused"):
        run("persistent", [streams(1, 10), streams(1, 2044, [1.0])])
    with pytest.raises(UserError, match="max-step-tokens"):
        run("persistent", [], scheduler=SchedulerConfig(max_step_tokens=4097, max_running=1))
    with pytest.raises(UserError, match="num-ports"):
        run("persistent", [], ring=RingConfig(num_ports=2))


def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    words = ["simulate", "--rates", "5,50", "--requests", "300", "--max-running", "16"]
    assert cli.main([*words, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    written = json.loads(file.read_text())
    assert [(one["path"], one["rate_per_s"]) for one in written["runs"]] == [
        (path, rate) for path in DEPTHS for rate in (5.0, 50.0)
    ]
    assert all(one["num_requests"] == 300 for one in written["runs"])
    assert written["configuration"]["scheduler"]["max_running"] == 16
    assert written["profile"]["name"] == "8b-h200"
    for one in written["runs"]:
        assert f"{one['ttft_ms']['p99']:.2f}" in shown
    gaps = {one["path"]: one["gap_share"] for one in written["runs"]}
    assert gaps["persistent"] < gaps["async"] < gaps["sync"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--rates", "0"], "--rates"),
        (["--rates", "many"], "not a list of numbers"),
        (["--paths", "fast"], "no 'fast' among"),
        (["--requests", "0"], "--requests"),
        (["--link-us", "-1"], "--link-us"),
        (["--costs", "nothing"], "no costs 'nothing'"),
        (["--profile", "nothing"], "no profile 'nothing'"),
        (["--trace", "/no/such/file"], "cannot be read"),
        (["--ring-slots", "3"], "num_slots=3"),
    ],
)
def test_wrong_words_are_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *words]) == 1
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
