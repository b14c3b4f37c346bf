"""The report's tables as values: what is said, and where each figure comes from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from loadtests.report import published
from loadtests.report.selection import Selection

PUBLISHED, MEASURED, EMULATED = "published", "measured", "emulated"


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure in words, and its origin: published, measured, or emulated."""

    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of each path beside the published one; None: there is none."""

    label: str
    theirs: Figure | None
    ours: dict[str, Figure | None]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title, with the source of the published column."""

    title: str
    note: str
    source: published.Source | None
    columns: list[str]
    rows: list[Row] = field(default_factory=list)


def percent(value: float | None, digits: int = 1) -> str | None:
    """A share."""
    return None if value is None else f"{100 * value:.{digits}f}\N{NO-BREAK SPACE}%"


def milliseconds(value: float | None) -> str | None:
    """Three significant digits."""
    return None if value is None else f"{three_digits(value)}\N{NO-BREAK SPACE}ms"


def three_digits(value: float) -> str:
    """A positive number with about three significant digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def times(value: float | None) -> str | None:
    """A ratio."""
    return None if value is None else f"{three_digits(value)}×"


class Tables:
    """All tables of a selection."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._origin = EMULATED if selection.is_emulated else MEASURED

    def _row(
        self,
        label: str,
        theirs: str | None,
        ours: Callable[[str], str | None],
        *,
        origin: str | None = None,
    ) -> Row:
        figures: dict[str, Figure | None] = {}
        for path in self._selection.paths:
            text = ours(path)
            figures[path] = None if text is None else Figure(text, origin or self._origin)
        return Row(label, Figure(theirs, PUBLISHED) if theirs else None, figures)

    def async_batching(self) -> Table:
        """The asynchronous-batching table."""
        pick = self._selection

        def steady(name: str) -> Callable[[str], float | None]:
            return lambda path: (pick.figures("steady", path) or {}).get(name)

        table = self._table(
            "Does the GPU wait for the host?",
            "Steady decode, no interference. Idle share: of the time with work, by the device's "
            "own clock, the part between steps.",
            published.ASYNC_BATCHING,
        )
        gap, step, turn = steady("gap_share"), steady("mean_step_ms"), steady("mean_gap_ms")
        rate, host = steady("tokens_per_s"), steady("host_us_per_token")
        theirs = (
            f"sync {percent(published.SYNC_IDLE_SHARE)}, "
            f"async {percent(published.ASYNC_IDLE_SHARE)}"
        )
        table.rows.extend(
            [
                self._row("GPU idle between steps", theirs, lambda p: percent(gap(p), 2)),
                self._row("Time inside a step", None, lambda p: milliseconds(step(p))),
                self._row("Time between steps", None, lambda p: milliseconds(turn(p))),
                self._row("Throughput, tokens/s", None, lambda p: _count(rate(p))),
                self._row(
                    "Time saved against sync",
                    f"async {percent(published.ASYNC_TIME_SAVED, 0)}",
                    lambda p: None if p == "sync" else percent(_saved(pick.gain(p, "sync"))),
                ),
                self._row(
                    "Host CPU per token",
                    None,
                    lambda p: None if (us := host(p)) is None else f"{us:.1f} µs",
                    origin=MEASURED,
                ),
            ]
        )
        return table

    def cpu_free(self) -> Table:
        """The CPU-free table: each path against the persistent one."""
        pick = self._selection
        rate = pick.rates[-1] if pick.rates else 0.0
        table = self._table(
            "What does it cost that a host takes part?",
            f"Ratios are a path's figure over the persistent path's, at {rate:g} requests/s, "
            "Poisson. Kept: steady decode with interference over that without.",
            published.BLINK,
        )

        def ratio(path: str, what: str, pressed: bool) -> float | None:
            mine = pick.percentile(path, what, rate, interference=pressed)
            best = pick.percentile("persistent", what, rate, interference=pressed)
            return mine / best if mine and best and path != "persistent" else None

        for what, name, theirs in (
            ("ttft_ms", "P99 TTFT", published.TTFT_P99_RATIO),
            ("tpot_ms", "P99 TPOT", published.TPOT_P99_RATIO),
        ):
            for pressed in (False, True):
                where = "under interference" if pressed else "idle"
                table.rows.extend(
                    [
                        self._row(
                            f"{name}, {where}",
                            None,
                            lambda p, w=what, i=pressed: milliseconds(  # type: ignore[misc]
                                pick.percentile(p, w, rate, interference=i)
                            ),
                        ),
                        self._row(
                            f"{name}, over persistent, {where}",
                            times(theirs) if not pressed else None,
                            lambda p, w=what, i=pressed: times(ratio(p, w, i)),  # type: ignore[misc]
                        ),
                    ]
                )
        kept = (
            f"host-driven {100 * published.KEPT_LOW:.0f}–{100 * published.KEPT_HIGH:.0f} %, "
            "CPU-free all"
        )
        energy = f"−{percent(published.ENERGY_SAVED)}"
        table.rows.extend(
            [
                self._row(
                    "Throughput kept under interference", kept, lambda p: percent(pick.kept(p))
                ),
                self._row("Energy per token", energy, lambda p: self._energy(p), origin=MEASURED),
            ]
        )
        return table

    def _energy(self, path: str) -> str | None:
        figures = self._selection.figures("steady", path)
        joules = figures["joules_per_token"] if figures else None
        return None if joules is None else f"{joules:.4f} J"

    def frozen(self) -> Table:
        """The host stands still."""
        pick = self._selection
        table = self._table(
            "What if the host stands still?",
            "Host and launcher are stopped (SIGSTOP) while streams decode. Longest time between "
            "two tokens of one stream, as its client sees it.",
            None,
        )
        for label, name in (
            ("Before", "gap_before_ms"),
            ("While the host stands, and after", "gap_frozen_ms"),
        ):
            table.rows.append(
                self._row(
                    label,
                    None,
                    lambda p, n=name: milliseconds(  # type: ignore[misc]
                        (pick.figures("frozen", p) or {}).get(n)
                    ),
                )
            )
        return table

    def counter_measures(self) -> Table:
        """What helps the host-driven paths."""
        pick = self._selection
        table = self._table(
            "Do counter-measures help?",
            "Throughput of steady decode kept under interference, with each measure taken for "
            "the host process.",
            None,
        )
        table.rows.append(self._row("none", None, lambda p: percent(pick.kept(p))))
        for measure in pick.measures():
            name = measure["name"]
            if measure["available"]:
                label = f"{name}: {measure['how']}"
            else:
                label = f"{name}: not available here, {measure['how']}"
            table.rows.append(
                self._row(label, None, lambda p, n=name: percent(pick.kept(p, n)))  # type: ignore[misc]
            )
        return table

    def _table(self, title: str, note: str, source: published.Source | None) -> Table:
        return Table(title, note, source, self._selection.paths)


def _count(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def _saved(gain: float | None) -> float | None:
    """Time saved by a throughput gain."""
    return None if gain is None else gain / (1 + gain)
