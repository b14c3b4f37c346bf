"""``python -m compose.images``: build the images of the roles, from nothing if need be."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from compose import wheelhouse
from compose.base_image import have_base_image
from compose.docker import Engine, docker
from compose.paths import COMPOSE_FILE
from engine.errors import UserError

BUILD_TIMEOUT_S = 1200.0


def build(say: Callable[[str], None]) -> None:
    """Base image, wheelhouse, images, each only where something changed; the engine must run."""
    say(f"base image {have_base_image()}")
    wheelhouse.gather(say)
    started = time.monotonic()
    docker(
        *("compose", "--file", COMPOSE_FILE, "--profile", "build", "build", "--quiet"),
        what="building the images",
        timeout_s=BUILD_TIMEOUT_S,
    )
    say(f"images built in {time.monotonic() - started:.0f} s")
    # Earlier builds of ours that no name points to any more.
    docker("image", "prune", "--force", "--filter", "label=blinkbed.image", what="pruning images")


def main() -> int:
    try:
        with Engine():
            build(lambda line: print(line, flush=True))
    except UserError as error:
        print(f"blinkbed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
