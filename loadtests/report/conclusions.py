"""What follows from the numbers, in sentences; what does not follow is "not shown"."""

from __future__ import annotations

from dataclasses import dataclass

from loadtests.report import published
from loadtests.report.selection import LEAST_NOISE, Selection
from loadtests.report.tables import percent, three_digits

SHOWN, PARTLY, REFUTED, NOT_SHOWN = "shown", "shown in part", "not so here", "not shown"
KEEPS_ALL = 0.99
SAME_GAP = 1.5
NOISE = LEAST_NOISE
EMULATED = (
    "; the simulated GPU's copies and wake-ups count in it, so it is no measure of a real GPU's"
)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """A verdict on a claim, and the sentence with its numbers."""

    verdict: str
    sentence: str


def conclusions(selection: Selection) -> list[Conclusion]:
    """One for each claim, in a fixed order."""
    return [
        _sync_waits(selection),
        _async_gains(selection),
        _persistent_never_waits(selection),
        _tail_latency(selection, "ttft_ms", "P99 TTFT", published.TTFT_P99_RATIO),
        _tail_latency(selection, "tpot_ms", "P99 TPOT", published.TPOT_P99_RATIO),
        _throughput_kept(selection),
        _host_frozen(selection),
        _energy(selection),
    ]


def _missing(claim: str, what: str) -> Conclusion:
    return Conclusion(NOT_SHOWN, f"{claim}: {what}.")


def _sync_waits(pick: Selection) -> Conclusion:
    sync = pick.figures("steady", "sync")
    if not sync or sync["gap_share"] is None:
        return _missing("A synchronous host leaves the GPU idle", "sync was not measured")
    share = sync["gap_share"]
    verdict = REFUTED
    if share > NOISE:
        verdict = PARTLY if pick.is_emulated else SHOWN
    return Conclusion(
        verdict,
        f"With a synchronous host the GPU is idle {percent(share)} of the time with work "
        f"(published: {percent(published.SYNC_IDLE_SHARE)}){EMULATED if pick.is_emulated else ''}.",
    )


def _async_gains(pick: Selection) -> Conclusion:
    gain = pick.gain("async", "sync")
    if gain is None:
        return _missing("Planning ahead removes the wait", "sync and async were not both measured")
    figures = pick.figures("steady", "async") or {}
    rest = percent(figures.get("gap_share"), 2)
    verb = "raises" if gain > 0 else "lowers"
    verdict, rider = NOT_SHOWN, ", which is within the noise"
    if abs(gain) > pick.noise:
        verdict, rider = (SHOWN if gain > 0 else REFUTED), ""
    if verdict == SHOWN and pick.is_emulated:
        verdict, rider = PARTLY, " of this emulation"
    return Conclusion(
        verdict,
        f"Planning step N+1 while N runs {verb} throughput by {percent(abs(gain))} over "
        f"synchronous{rider}; the GPU is still idle {rest} of the time.",
    )


def _persistent_never_waits(pick: Selection) -> Conclusion:
    mine = pick.figures("steady", "persistent")
    if not mine or mine["gap_share"] is None:
        return _missing("A GPU that schedules itself does not wait", "persistent was not measured")
    shares = {
        path: figures["gap_share"]
        for path in ("sync", "async")
        if (figures := pick.figures("steady", path)) and figures["gap_share"] is not None
    }
    sentence = (
        f"When the GPU schedules itself it is idle {percent(mine['gap_share'], 2)} of the time"
    )
    if not shares:
        return Conclusion(NOT_SHOWN, sentence + "; no host-driven path was measured beside it.")
    beside = ", ".join(f"{path} {percent(share, 2)}" for path, share in shares.items())
    mine_share = mine["gap_share"]
    waits_more = [share > mine_share + NOISE for share in shares.values()]
    verdict = NOT_SHOWN
    if any(waits_more):
        verdict = SHOWN if all(waits_more) else PARTLY
    elif mine_share > min(shares.values()) + NOISE:
        verdict = REFUTED
    return Conclusion(verdict, f"{sentence} (beside {beside}).")


def _tail_latency(pick: Selection, what: str, name: str, theirs: float) -> Conclusion:
    claim = f"{name} is lower without a host"
    if not pick.rates:
        return _missing(claim, "no load was measured")
    rate = pick.rates[-1]
    parts, ratios = [], []
    for pressed in (False, True):
        mine = pick.percentile("persistent", what, rate, interference=pressed)
        for path in ("sync", "async"):
            other = pick.percentile(path, what, rate, interference=pressed)
            if mine and other:
                ratios.append(other / mine)
                where = "under interference" if pressed else "idle"
                parts.append(f"{path} {three_digits(other / mine)}× {where}")
    if not ratios:
        return _missing(claim, "persistent and a host-driven path were not both measured")
    verdict = PARTLY
    if min(ratios) > 1 + NOISE:
        verdict = SHOWN
    elif max(ratios) <= 1 + NOISE:
        verdict = REFUTED
    return Conclusion(
        verdict,
        f"{name} at {rate:g} requests/s, over the persistent path's: {', '.join(parts)} "
        f"(published: up to {theirs:g}×).",
    )


def _throughput_kept(pick: Selection) -> Conclusion:
    kept = {path: share for path in pick.paths if (share := pick.kept(path)) is not None}
    if "persistent" not in kept or len(kept) < 2:
        return _missing(
            "Interference slows who needs the host", "not measured on persistent and another path"
        )
    mine = kept["persistent"]
    others = [share for path, share in kept.items() if path != "persistent"]
    words = ", ".join(f"{path} {percent(share)}" for path, share in kept.items())
    is_so = mine >= KEEPS_ALL and mine > max(others) + pick.noise
    return Conclusion(
        SHOWN if is_so else REFUTED,
        f"Under interference on the host's CPUs steady decode keeps of its throughput: {words} "
        f"(published: host-driven {100 * published.KEPT_LOW:.0f}–"
        f"{100 * published.KEPT_HIGH:.0f} %, CPU-free all).",
    )


def _host_frozen(pick: Selection) -> Conclusion:
    figures = pick.figures("frozen", "persistent")
    if not figures or not figures["gap_before_ms"] or figures["gap_frozen_ms"] is None:
        return _missing("A frozen host stops no token", "persistent was not measured")
    before, frozen = figures["gap_before_ms"], figures["gap_frozen_ms"]
    return Conclusion(
        SHOWN if frozen <= SAME_GAP * before else REFUTED,
        f"With the host stopped for {figures['frozen_s']:.0f} s the persistent path's longest gap "
        f"between tokens is {three_digits(frozen)} ms ({three_digits(before)} ms before).",
    )


def _energy(pick: Selection) -> Conclusion:
    found = {
        path: figures["joules_per_token"]
        for path in pick.paths
        if (figures := pick.figures("steady", path)) and figures["joules_per_token"]
    }
    if "persistent" not in found or len(found) < 2:
        why = "no GPU with an energy counter took part"
        return _missing("Energy per token is lower without a host", why)
    mine = found.pop("persistent")
    saved = {path: 1 - mine / joules for path, joules in found.items()}
    words = ", ".join(f"{percent(share)} less than {path}" for path, share in saved.items())
    return Conclusion(
        SHOWN if min(saved.values()) > NOISE else REFUTED,
        f"The persistent path's GPU takes {words} per token "
        f"(published: {percent(published.ENERGY_SAVED)} less).",
    )
