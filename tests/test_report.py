"""The report says what the results say, marks where each figure comes from, and renders."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from engine.cli import main
from engine.errors import UserError
from loadtests.report.chart import round_numbers, spread_labels
from loadtests.report.conclusions import NOT_SHOWN, PARTLY, REFUTED, SHOWN, conclusions
from loadtests.report.selection import Selection
from loadtests.report.timeline import gap_share, read_timeline, trace
from tests.report_results import PATHS, all_results, result, write_comparison

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = (1100, 3600)
CHECK = """
<script>
const problems = [];
if (document.documentElement.scrollWidth > innerWidth) problems.push("the page is too wide");
for (const svg of document.querySelectorAll("svg")) {
  const boxes = [...svg.querySelectorAll("text")].map(
    (text) => [text.textContent, text.getBoundingClientRect()]);
  boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
    const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
    const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
    if (x > 1 && y > 4) problems.push(`${a} covers ${b}`);
  }));
}
document.documentElement.dataset.problems = problems.join("; ") || "none";
</script>
"""


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The page of a whole comparison."""
    source = write_comparison(tmp_path, all_results())
    output = tmp_path / "out" / "report.html"
    assert main(["report", "--input", str(source), "--output", str(output)]) == 0
    return output


def browser() -> str:
    """A browser's program; in CI there must be one."""
    found = next((name for name in BROWSERS if shutil.which(name)), None)
    if found is None:
        reason = f"no browser: none of {', '.join(BROWSERS)} is installed"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


def browse(page: Path, *words: str) -> str:
    """Open a page without a screen; what the browser printed."""
    command = [browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    profile = f"--user-data-dir={page.parent / 'profile'}"
    size = f"--window-size={SIZE[0]},{SIZE[1]}"
    done = subprocess.run(
        [*command, profile, size, *words, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def test_the_page_needs_nothing_from_outside(made: Path) -> None:
    text = made.read_text()
    assert not re.search(r"(src|href)\s*=|@import|url\(|https?://", text)
    assert text.count("<svg") == 5  # four panels, one timeline


def test_figures_are_marked_by_origin(made: Path) -> None:
    text = made.read_text()
    for origin, figure in (
        ("published", "8.47×"),
        ("published", "3.40×"),
        ("emulated", "38.5\N{NO-BREAK SPACE}%"),
        ("measured", "12.5 µs"),
    ):
        pattern = rf'class="figure {origin}"[^>]*><i>{origin[0].upper()}</i>{re.escape(figure)}<'
        assert re.search(pattern, text), figure
    markdown = made.with_suffix(".md").read_text()
    assert "8.47× (published)" in markdown
    assert "38.5\N{NO-BREAK SPACE}% (emulated)" in markdown


def test_the_page_renders_in_a_browser_without_overlap(made: Path) -> None:
    page = made.with_name("checked.html")
    page.write_text(made.read_text().replace("</body>", CHECK + "</body>"))
    dom = browse(page, "--dump-dom")
    assert 'data-ready="1"' in dom
    found = re.search(r'data-problems="([^"]*)"', dom)
    assert found is not None
    assert found[1] == "none"
    picture = made.with_suffix(".png")
    browse(made, f"--screenshot={picture}")
    data = picture.read_bytes()
    assert struct.unpack(">II", data[16:24]) == SIZE
    assert len(data) > 50_000, "the picture is nearly empty"


def verdicts(results: list[dict[str, Any]]) -> list[str]:
    return [one.verdict for one in conclusions(Selection(results))]


def test_conclusions_follow_from_the_numbers() -> None:
    expected = [PARTLY, PARTLY, PARTLY, PARTLY, PARTLY, SHOWN, SHOWN, NOT_SHOWN]
    assert verdicts(all_results()) == expected
    text = "\n".join(one.sentence for one in conclusions(Selection(all_results())))
    assert "sync 38.5\N{NO-BREAK SPACE}%, async 52.6\N{NO-BREAK SPACE}%" in text


def test_what_a_simulated_gpu_adds_to_a_wait_is_not_taken_for_the_design() -> None:
    results = all_results()
    assert "simulated GPU" in conclusions(Selection(results))[0].sentence
    for one in results:
        one["configuration"]["device"] = "cuda"
    real = conclusions(Selection(results))
    assert [one.verdict for one in real[:2]] == [SHOWN, SHOWN]
    assert "simulated" not in real[0].sentence


def test_a_gain_within_the_noise_that_the_numbers_show_is_not_shown() -> None:
    results = all_results()
    sync = next(one for one in results if one["cell"]["kind"] == "steady")
    for one in results:
        cell = one["cell"]
        if (cell["kind"], cell["path"]) == ("steady", "async") and not cell["has_interference"]:
            one["figures"]["tokens_per_s"] = 1.023 * sync["figures"]["tokens_per_s"]
    assert verdicts(results)[1] == PARTLY
    for one in results:
        cell = one["cell"]
        if (cell["kind"], cell["path"], cell["measure"]) == ("steady", "persistent", "realtime"):
            one["figures"]["tokens_per_s"] *= 1.04
    assert Selection(results).noise == pytest.approx(0.037, abs=0.002)
    assert verdicts(results)[1] == NOT_SHOWN


def test_a_valid_figure_of_another_commit_does_not_stand_in_for_one_not_valid() -> None:
    old, new = result("steady", "async"), result("steady", "async")
    new |= {"commit": "another", "valid": False, "reasons": ["the paced device was late"]}
    selection = Selection([old, new])
    assert selection.figures("steady", "async") is None
    assert selection.others == 1


def test_an_emulated_report_has_the_real_gpu_beside_it(made: Path) -> None:
    markdown = made.with_suffix(".md").read_text()
    assert "What a real GPU says" in markdown
    for row in (
        r"Throughput kept under interference \| 19\.7.% \| 46\.2.% \| 99\.8.%",
        r"Energy per token, under interference \| 0\.174.J \| 0\.118.J \| 0\.095.J",
        r"host stopped for 10 s \| 10,015.ms \| 10,013.ms \| 40\.7.ms",
    ):
        assert re.search(row, markdown), row


def test_conclusions_turn_when_the_numbers_do() -> None:
    results = all_results()
    for one in results:
        cell, figures = one["cell"], one["figures"]
        if cell["path"] == "persistent" and figures:
            if cell["kind"] == "frozen":
                figures["gap_frozen_ms"] = 10_000.0
            if cell["has_interference"]:
                figures["tokens_per_s"] /= 2
    assert verdicts(results)[5:7] == [REFUTED, REFUTED]


def test_what_was_not_measured_or_not_valid_is_not_shown() -> None:
    alone = [one for one in all_results() if one["cell"]["path"] == "persistent"]
    assert verdicts(alone) == [NOT_SHOWN] * 6 + [SHOWN, NOT_SHOWN]
    results = all_results()
    for one in results:
        if one["cell"]["path"] == "sync":
            one["valid"], one["reasons"] = False, ["the paced device was late"]
    assert verdicts(results)[0] == NOT_SHOWN
    assert Selection(results).invalid


def test_energy_is_compared_where_it_was_measured() -> None:
    results = all_results()
    for one in results:
        if one["figures"]:
            is_free = one["cell"]["path"] == "persistent"
            one["figures"]["joules_per_token"] = 0.09 if is_free else 0.18
    (last,) = conclusions(Selection(results))[-1:]
    assert last.verdict == SHOWN
    assert "50.0\N{NO-BREAK SPACE}% less than sync" in last.sentence


def test_a_later_result_replaces_an_earlier_one_but_not_by_an_invalid_one() -> None:
    first, second, third = (result("steady", "sync") for _ in range(3))
    second["figures"] = {**first["figures"], "tokens_per_s": 1.0}
    third["valid"] = False
    figures = Selection([first, second, third]).figures("steady", "sync")
    assert figures is not None
    assert figures["tokens_per_s"] == 1.0


def test_results_of_another_configuration_are_left_out_and_counted() -> None:
    results = all_results()
    other = result("steady", "sync")
    other["configuration"] = {**other["configuration"], "model": "another"}
    selection = Selection([other, *results])
    assert selection.others == 1


def test_the_trace_names_paths_and_lanes_and_keeps_the_times(made: Path) -> None:
    value = json.loads((made.parent / "trace.json").read_text())
    names = [one["args"]["name"] for one in value["traceEvents"] if one["name"] == "process_name"]
    assert names == [f"path {path}" for path in PATHS]
    spans = [one for one in value["traceEvents"] if one["ph"] == "X"]
    first = next(one for one in spans if one["cat"] == "device")
    assert (first["ts"], first["dur"]) == (0.0, 4600.0)
    assert first["args"] == {"step": 0, "tokens": 32, "rows": 32}


def test_gaps_of_a_timeline_are_those_between_steps(made: Path) -> None:
    shares = {}
    for path in PATHS:
        shares[path] = gap_share(read_timeline(made.parent.parent / f"timeline-{path}.json"))
    assert shares["sync"] == pytest.approx(1.45 / 6.05, rel=0.1)
    assert shares["persistent"] == pytest.approx(0.012 / 4.612, rel=0.1)
    assert trace([])["traceEvents"] == []


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"path": "sync", "events": [{"lane": 1}]}'])
def test_a_damaged_timeline_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    file = tmp_path / "timeline-sync.json"
    file.write_text(text)
    with pytest.raises(UserError, match="is not a timeline"):
        read_timeline(file)


def test_without_results_the_command_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--input", str(tmp_path / "none.jsonl")]) == 1
    assert "run `blinkbed compare` first" in capsys.readouterr().err


def test_axes_have_round_numbers_and_labels_keep_apart() -> None:
    assert round_numbers(3, 40) == [2, 5, 10, 20, 50]
    heights = sorted(spread_labels({"sync": 100.0, "async": 101.0, "persistent": 102.0}).values())
    assert heights[1] - heights[0] >= 15
    assert heights[2] - heights[1] >= 15
