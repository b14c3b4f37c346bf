"""The demo: the whole of it with the real model, and its parts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from engine.config import ServeConfig
from engine.demo.story import DemoError, Frozen, check, real_and_emulated, table
from engine.demo.stream import ChatStream, events
from engine.demo.view import Panes, PlainLines, fit, printable
from engine.freeze import Freeze, FreezeError, process_state
from engine.ready import ReadyLine
from tests.server import processes_naming

READY = ReadyLine(
    "http://127.0.0.1:1",
    "smollm2",
    "sim",
    "shm",
    "simulated device memory",
    "persistent",
    1,
    2,
    3,
    4,
)
FROZEN = Frozen(10.0, 14.0, 3)
TIMING = {"queue_ms": 1.0, "link_ms": 0.5, "prefill_ms": 20.0, "decode_ms": 800.0}


def finished_stream() -> ChatStream:
    stream = ChatStream("Why?", 8)
    stream.text = "Because."
    stream.arrivals = [(9.0, 1), (11.0, 3), (13.5, 6), (15.0, 8)]
    stream.finish_reason = "length"
    stream.timing = dict(TIMING)
    return stream


def test_the_demo_freezes_the_host_and_tokens_keep_coming() -> None:
    started_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli", "demo"],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.returncode == 0, done.stderr
    frozen = re.search(r"(\d+) tokens came while they stood still", done.stdout)
    assert frozen
    assert int(frozen[1]) > 0
    assert "both in state T" in done.stdout
    assert "queue ms" in done.stdout
    assert "Emulated: GPU" in done.stdout
    url = re.search(r"http://127.0.0.1:(\d+)", done.stdout)
    assert url
    assert time.monotonic() - started_s < 280
    assert "Traceback" not in done.stderr


def test_a_demo_that_cannot_start_says_why_in_one_sentence() -> None:
    words = ["demo", "--model", "/no/such/model"]
    done = subprocess.run(
        [sys.executable, "-m", "engine.cli", *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "/no/such/model" in done.stderr.splitlines()[-1]
    assert processes_naming("/no/such/model") == []


def test_a_complete_demo_passes_its_check() -> None:
    check([finished_stream()], FROZEN, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"error": "gone"}, "answer 1 is not complete: gone"),
        ({"finish_reason": "abort"}, "abort"),
        ({"timing": {}}, "queue_ms"),
        ({"arrivals": [(9.0, 1), (15.0, 8)]}, "no token came"),
    ],
)
def test_the_check_names_what_did_not_happen(change: dict[str, object], words: str) -> None:
    stream = finished_stream()
    for name, value in change.items():
        setattr(stream, name, value)
    with pytest.raises(DemoError, match=words):
        check([stream], FROZEN, 0)


def test_the_check_wants_tokens_late_in_the_freeze_and_a_clean_drain() -> None:
    with pytest.raises(DemoError, match="stopped coming"):
        check([finished_stream()], Frozen(10.0, 14.0, 0), 0)
    with pytest.raises(DemoError, match="exit status 1"):
        check([finished_stream()], FROZEN, 1)


def test_tokens_are_counted_by_their_arrival() -> None:
    stream = finished_stream()
    assert stream.num_tokens == 8
    assert stream.tokens_between(10.0, 14.0) == 5
    assert stream.tokens_per_s == pytest.approx(7 / 6)


def test_the_table_has_a_line_for_each_request() -> None:
    lines = table([finished_stream(), finished_stream()], FROZEN).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["1", "8", "1.00", "0.50", "20.00", "800.00", "1.2", "5", "length"]


def test_what_is_emulated_follows_the_stack() -> None:
    assert "Real: model smollm2" in real_and_emulated(READY)
    assert "GPU" in real_and_emulated(READY).split("Emulated:")[1]
    scripted = real_and_emulated(
        ReadyLine.from_line(READY.to_line().replace("smollm2", "scripted"))
    )
    assert "scripted model" in scripted.split("Emulated:")[1]


def test_a_ready_line_is_read_back() -> None:
    assert ReadyLine.from_line(READY.to_line()) == READY
    for line in ("", "ready:", "ready: url=x", "noise"):
        with pytest.raises(ValueError, match="not a ready line"):
            ReadyLine.from_line(line)


def test_a_stream_cut_before_its_end_is_an_error() -> None:
    whole = [b'data: {"a": 1}\n', b"\n", b": comment\n", b"data: [DONE]\n"]
    assert list(events(iter(whole))) == [{"a": 1}]
    with pytest.raises(ValueError, match="cut"):
        list(events(iter(whole[:-1])))


def test_a_frozen_process_is_in_state_t_and_goes_on_afterwards() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        with Freeze([process.pid]) as freeze:
            assert freeze.holds()
            assert process_state(process.pid) == "T"
        assert freeze.ended_at > freeze.began_at
        assert process_state(process.pid) != "T"
    finally:
        process.kill()
        process.wait()
    with pytest.raises(FreezeError), Freeze([process.pid]):
        pass


def test_plain_lines_show_all_of_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    stream = ChatStream("q", 9)
    stream.text = "word " * 40 + "tail"
    view = PlainLines([stream])
    view.draw("")
    view.draw("")
    view.end()
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("[1] ") for line in lines)
    assert " ".join(line.removeprefix("[1] ") for line in lines) == stream.text


def test_panes_keep_their_height_and_width(capsys: pytest.CaptureFixture[str]) -> None:
    streams = [ChatStream("a question that is longer than its pane " * 3, 9) for _ in range(2)]
    view = Panes(streams, num_across=2, num_lines=3, width=40)
    for text in ("", "short", "wide \u6f22\u5b57 \U0001f600 " * 30, "\x1b[2Jx" * 50):
        streams[0].text = text
        view.draw("status")
        drawn = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", capsys.readouterr().out)
        assert drawn.count("\n") == 1 + 3 + 1
        assert "\x1b" not in drawn


def test_text_fits_its_cells() -> None:
    assert fit("abc", 5) == "abc  "
    assert fit("abcdef", 3) == "abc"
    assert fit("a\u6f22b", 2) == "a "
    assert printable("a\x1b[2Jb\n c") == "a[2Jb c"


def test_the_demo_takes_a_free_port_by_default() -> None:
    assert ServeConfig().smartnic.port != 0
