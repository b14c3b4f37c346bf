"""The comparison measures what it says, writes it down, and goes on where it stopped."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main
from engine.errors import UserError
from loadtests.compare.cell import Cell, key_of
from loadtests.compare.client import Client, Request, Timing
from loadtests.compare.command import Comparison, add_arguments
from loadtests.compare.figures import client_figures, device_figures, longest_gap_ms, spread
from loadtests.compare.grid import Grid
from loadtests.compare.load import requests_of
from loadtests.compare.measure import doubts
from loadtests.compare.store import Store, read_results

GRID = Grid(
    paths=("sync", "persistent"), rates_per_s=(4.0, 8.0), measures=("realtime",),
    measure_rate_per_s=4.0, load_s=1.0, steady_s=1.0, frozen_s=1.0, batch=8,
)  # fmt: skip


def stored(key: str, *, valid: bool = True) -> dict[str, Any]:
    return {"schema": 1, "key": key, "valid": valid}


def test_the_grid_has_each_cell_once_and_keeps_a_path_together() -> None:
    cells = list(GRID.cells())
    assert len(cells) == len(set(cells)) == 2 * (3 + 3 + 2 + 2)
    paths = [cell.path for cell in cells]
    assert paths == sorted(paths, key=("sync", "persistent").index)
    assert all(cell.has_interference for cell in cells if cell.measure != "none")


def test_a_key_depends_on_cell_configuration_and_commit() -> None:
    cell = Cell("steady", "sync", batch=32)
    keys = {
        key_of(cell, {"model": "a"}, "1"),
        key_of(cell, {"model": "b"}, "1"),
        key_of(cell, {"model": "a"}, "2"),
        key_of(Cell("steady", "async", batch=32), {"model": "a"}, "1"),
    }
    assert len(keys) == 4
    assert key_of(cell, {"model": "a"}, "1") in keys


def test_a_store_keeps_lines_and_survives_a_torn_one(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "results.jsonl"
    store = Store(file)
    store.add(stored("a"))
    store.add(stored("b", valid=False))
    with file.open("a") as end:
        end.write('{"schema": 1, "key": "c", "val')
    again = Store(file)
    assert [one["key"] for one in again.results] == ["a", "b"]
    assert again.has("a")
    assert not again.has("b"), "a cell that is not valid is measured again"
    again.add(stored("d"))
    assert [one["key"] for one in read_results(file)] == ["a", "b", "d"]


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(stored("a")) + "\nnonsense\n" + json.dumps(stored("b")) + "\n")
    with pytest.raises(UserError, match="line 2 is not a result"):
        read_results(file)


def test_figures_of_known_times() -> None:
    timings = [
        Timing(0.0, 4, [0.1, 0.2, 0.3, 0.4]),
        Timing(0.0, 1, [0.5]),
        Timing(0.0, 9, [], "no"),
    ]
    figures = client_figures(timings, 0.0, 0.45)
    assert figures["num_tokens"] == 4
    assert figures["num_failed"] == 1
    assert figures["ttft_ms"]["max"] == 500.0
    assert figures["tpot_ms"]["p50"] == 100.0
    assert figures["tokens_per_s"] == pytest.approx(4 / 0.45, rel=1e-3)
    assert spread([]) is None
    assert spread([value / 1000 for value in range(1, 101)]) == {
        "p50": 50, "p90": 90, "p99": 99, "max": 100, "mean": 50.5,
    }  # fmt: skip


def test_device_shares_are_differences_of_its_own_counters() -> None:
    names = ("engine_step_seconds", "engine_gap_seconds", "engine_idle_seconds")
    before = dict.fromkeys((*names, "engine_steps", "generation_tokens"), 5.0)
    after = {
        "engine_step_seconds": 8.0,
        "engine_gap_seconds": 6.0,
        "engine_idle_seconds": 5.0,
        "engine_steps": 105.0,
        "generation_tokens": 3205.0,
    }
    figures = device_figures(before, after, 4.0)
    assert figures["gap_share"] == 0.25
    assert figures["busy_share"] == 0.75
    assert figures["mean_step_ms"] == 30.0
    assert figures["device_tokens"] == 3200
    assert device_figures(before, before, 4.0)["gap_share"] is None


def test_the_longest_gap_counts_streams_that_never_went_on() -> None:
    going = Timing(0.0, 9, [1.0, 1.1, 1.4, 1.5])
    assert longest_gap_ms([going], 1.0, 2.0) == 300.0
    lost = Timing(0.0, 9, [1.0, 1.1], "lost")
    assert longest_gap_ms([going, lost], 1.0, 3.0) == 1900.0
    assert longest_gap_ms([], 1.0, 3.0) is None


def test_a_device_that_was_late_makes_the_cell_invalid() -> None:
    good = {
        "pace": {"paced_late_steps": 1.0},
        "num_steps": 100,
        "num_failed": 0,
        "num_ended": 3,
        "num_tokens": 9,
    }
    late = {**good, "pace": {"paced_late_steps": 50.0}}
    failed = {**good, "num_failed": 1, "first_error": "no"}
    cell = Cell("load", "sync", rate_per_s=4.0)
    assert doubts(cell, good) == []
    assert "did not keep" in doubts(cell, late)[0]
    assert "requests failed" in doubts(cell, failed)[0]
    assert doubts(cell, {**good, "num_tokens": 0}) == ["no token came"]
    assert "streams ended" in doubts(Cell("frozen", "sync", batch=8), good)[0]
    assert (
        "requests failed" in doubts(Cell("steady", "sync", batch=8), {**failed, "num_ended": 0})[0]
    )


def test_arrivals_are_the_same_for_every_path_and_fit_the_context() -> None:
    cell = Cell("load", "sync", rate_per_s=20.0, seconds=10.0)
    requests = requests_of(cell, 512)
    assert requests == requests_of(Cell("load", "async", rate_per_s=20.0, seconds=10.0), 512)
    assert 120 < len(requests) < 280
    assert all(one.num_prompt + one.num_output < 512 and one.at_s < 10 for one in requests)
    assert requests != requests_of(Cell("load", "sync", rate_per_s=20.0, seconds=10.0, seed=2), 512)


async def _serve_pieces(pieces: list[bytes]) -> Timing:
    """A server that writes the pieces one by one, each once the one before has been read."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.002)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = Client(f"http://127.0.0.1:{port}")
    await client.play([Request(0.0, 5, 2)], asyncio.get_running_loop().time() + 20)
    server.close()
    return client.timings[0]


def test_token_events_are_counted_however_they_are_cut() -> None:
    text = b'HTTP/1.1 200 OK\r\n\r\ndata: {"a"}\n\ndata: {"b"}\n\ndata: [DONE]\n\n'
    for size in (1, 3, 7, 11, 1000):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        timing = asyncio.run(_serve_pieces(pieces))
        assert (len(timing.times_s), timing.error) == (2, ""), size


def test_errors_and_lost_connections_are_told() -> None:
    cut = asyncio.run(_serve_pieces([b'HTTP/1.1 200 OK\r\n\r\ndata: {"a"}\n\n']))
    assert "connection was lost" in cut.error
    refused = asyncio.run(_serve_pieces([b'HTTP/1.1 429 No\r\n\r\n{"error": "full"}']))
    assert "full" in refused.error


@pytest.mark.parametrize(
    "words",
    [
        ["--paths", "magic"],
        ["--parts", ""],
        ["--rates", "4,x"],
        ["--rates", "-1"],
        ["--measures", "prayer"],
    ],
)
def test_bad_flags_are_one_sentence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *words]) == 1
    message = capsys.readouterr().err
    assert message.startswith("blinkbed: --")
    assert message.count("\n") == 1


def test_a_small_comparison_end_to_end_goes_on_where_it_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Somebody may edit the tree while this runs.
    monkeypatch.setattr("loadtests.compare.command.commit", lambda: "a commit")
    file = tmp_path / "compare.jsonl"
    words = [
        "compare", "--output", str(file), "--model", "scripted", "--paths", "persistent",
        "--parts", "load", "--load-s", "1", "--rates", "8", "--context", "1024",
        "--interference", "own", "--measures", "cache-partition",
    ]  # fmt: skip
    assert main(words) == 0
    results = read_results(file)
    assert [one["cell"]["has_interference"] for one in results] == [False, True, True]
    idle, pressed, partition = results
    assert idle["figures"]["num_tokens"] > 0
    assert idle["figures"]["num_steps"] > 0
    assert idle["figures"]["host_us_per_token"] is not None
    assert "own burners" in pressed["interference"]
    assert partition["measure"]["available"] == (partition["figures"] is not None)
    assert idle["commit"] == "a commit"
    assert idle["hardware"]["num_cpus"] >= 2
    assert "CPUs: host and interference on CPU" in capfd.readouterr().err
    assert main(words) == 0
    assert read_results(file) == results
    assert "3 of 3 cells are measured already" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "is_first"),
    [
        ([], True),
        (["--no-device-first"], False),
        (["--model", "scripted"], False),
        (["--model", "scripted", "--device-first"], True),
    ],
)
def test_a_paced_device_goes_first_and_one_that_computes_last(
    words: list[str], is_first: bool, tmp_path: Path
) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args([*words, "--output", str(tmp_path / "none.jsonl")])
    assert Comparison(given)._configuration()["device_first"] is is_first
