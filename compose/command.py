"""Running other programs: output captured, bounded in time, errors as one sentence."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.errors import UserError

TIMEOUT_S = 600.0


class CommandError(UserError):
    """A program could not be run, failed, or took too long; the message has its last words."""


def run(
    words: Sequence[str | Path],
    *,
    what: str,
    timeout_s: float = TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    both: bool = False,
) -> str:
    """Its stdout (`both`: stdout, then stderr). Raises CommandError, which begins with `what`."""
    try:
        done = subprocess.run(
            [str(word) for word in words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            env={**os.environ, **(environment or {})},
            cwd=folder,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"{what} took longer than {timeout_s:.0f} s") from None
    except OSError as error:
        raise CommandError(f"{what} failed: {words[0]}: {error.strerror or error}") from None
    if done.returncode:
        raise CommandError(f"{what} failed: {last_words(done.stderr or done.stdout)}")
    return done.stdout + done.stderr if both else done.stdout


def last_words(output: str, num_lines: int = 4) -> str:
    """The last lines that are not empty, in one."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return " | ".join(lines[-num_lines:]) or "no message"
