"""``blinkbed doctor``: what this host can do, line by line, with the fix for each failing line."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence

from emulation.probe import (
    EMULATED,
    HOST_RDMA,
    LINKS,
    OTHERS,
    Finding,
    links_that_work,
    perform,
)
from engine.errors import UserError

EXIT_LINK_CANNOT_WORK = 3


def doctor(as_json: bool = False, *, link: str = "auto") -> int:
    """Print what works; the exit status is 3 if `link` cannot work here ("auto": none can)."""
    if link not in ("auto", *LINKS):
        raise UserError(f"--link {link}: there is auto, {', '.join(LINKS)}")
    findings: list[Finding] = []
    for finding in examine():
        findings.append(finding)
        if not as_json:
            print(line_of(finding), flush=True)
    working = links_that_work(findings)
    best = link if link in working else (working[0] if link == "auto" and working else "")
    if as_json:
        print(json.dumps(report(findings, link, best), indent=2))
    else:
        print(verdict(findings, link, best))
    sys.stdout.flush()
    return 0 if best else EXIT_LINK_CANNOT_WORK


def examine() -> Iterator[Finding]:
    """Every check, in order, as it is done."""
    for check in (*HOST_RDMA, *EMULATED, *OTHERS):
        yield perform(check)


def line_of(finding: Finding) -> str:
    """One finding for people."""
    mark = "ok  " if finding.works else "no  "
    text = f"{mark} {finding.name}: {finding.detail}"
    return text if finding.works else f"{text}\n       fix: {finding.fix}"


def verdict(findings: Sequence[Finding], link: str, best: str) -> str:
    """The last line."""
    if best:
        return f"--link {link} works here" + (f": {best}" if link == "auto" else "")
    lacking = [one.name for one in findings if not one.works and link in one.links]
    return f"--link {link} cannot work here: {', '.join(lacking) or 'no link does'}"


def report(findings: Sequence[Finding], link: str, best: str) -> dict[str, object]:
    """Everything, for programs."""
    return {
        "asked_link": link,
        "link": best or None,
        "links": links_that_work(findings),
        "checks": [dataclasses.asdict(finding) for finding in findings],
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--json", action="store_true", help="print all findings as JSON")
    help_text = "end with status 3 unless this link works (default: auto, any)"
    parser.add_argument("--link", choices=("auto", *LINKS), default="auto", help=help_text)


def run(arguments: argparse.Namespace) -> int:
    """Carry the command out."""
    return doctor(arguments.json, link=arguments.link)
