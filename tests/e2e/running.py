"""A stack for tests: started by testcontainers' Compose support, ended whatever happens."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testcontainers.compose import DockerCompose

from compose.docker import environment
from compose.paths import COMPOSE_FILE, REPOSITORY
from compose.stack import ContainerStack, sweep, variables
from tests.server import flag_words

PREFIX = f"blinkbed-e2e-{hashlib.sha256(bytes(REPOSITORY)).hexdigest()[:8]}"
"""Begins the names of this checkout's test stacks, and of no others."""
SWEPT = rf"{PREFIX}-\d+-\d+"
_numbers = itertools.count(1)


def sweep_left_behind() -> list[str]:
    """Remove what any test run of this checkout left, also one that was killed."""
    return sweep(SWEPT)


@contextmanager
def running_stack(link: str, **flags: object) -> Iterator[ContainerStack]:
    """A stack on this link with these flags of `blinkbed serve`; healthy when entered."""
    project = f"{PREFIX}-{os.getpid()}-{next(_numbers)}"
    os.environ.update(environment())  # testcontainers runs docker with our own variables
    with tempfile.TemporaryDirectory() as folder:
        env_file = Path(folder, "stack.env")
        filled_in = variables(project, flag_words(flags))
        env_file.write_text("".join(f"{key}={value}\n" for key, value in filled_in.items()))
        compose = DockerCompose(
            COMPOSE_FILE.parent,
            compose_file_name=COMPOSE_FILE.name,
            env_file=str(env_file),
            profiles=[link],
        )
        stack = ContainerStack(project)
        try:
            try:
                compose.start()
            except subprocess.CalledProcessError as error:
                raise AssertionError(_why(stack, error.stderr)) from None
            yield stack
        finally:
            sweep(project)  # at once; `compose down` would drain what nobody waits for


def _why(stack: ContainerStack, said: bytes) -> str:
    logs = "\n".join(f"--- {role}\n{text}" for role, text in stack.logs().items())
    return f"the stack did not start: {said.decode(errors='replace')[-1000:]}\n{logs}"
