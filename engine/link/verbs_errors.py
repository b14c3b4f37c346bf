"""What can go wrong between this program and the verbs library, each in words."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

from engine.errors import UserError
from engine.link import LinkError


class VerbsSetupError(LinkError, UserError):
    """RDMA cannot be set up here; the text says what is wrong and what to do."""


def pyverbs(name: str) -> ModuleType:
    """A module of pyverbs; VerbsSetupError where it is not installed."""
    try:
        return importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        raise VerbsSetupError(
            f"pyverbs cannot be imported ({error}); install it (Debian: apt-get install "
            "python3-pyverbs) for the Python that runs this"
        ) from error


def enums() -> ModuleType:
    """The constants of libibverbs; rdma-core 50 renamed their module."""
    pyverbs("pyverbs_error")
    for name in ("libibverbs_enums", "enums"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"pyverbs.{name}")
    raise VerbsSetupError("this pyverbs has no enums module; install rdma-core 44 or later")


@contextlib.contextmanager
def verb(name: str) -> Iterator[None]:
    """Names the verbs call that failed inside: LinkError("ibv_... failed: why")."""
    try:
        yield
    except pyverbs("pyverbs_error").PyverbsError as error:
        raise LinkError(f"{name} failed: {error}") from error
