"""Where things are: the repository, and what is made in it and not kept in git."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
COMPOSE_FILE = REPOSITORY / "compose" / "compose.yaml"
WHEELHOUSE = REPOSITORY / "compose" / ".wheelhouse"
"""What images are built from: Python wheels, Debian packages, the default model."""
TOOLS = REPOSITORY / "compose" / ".tools"
"""What was installed for this checkout alone: Compose, a started engine's log and process id."""
