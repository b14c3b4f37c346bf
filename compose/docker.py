"""The container engine and Compose: found, or installed and started, and ended again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from compose import debian
from compose.command import CommandError, run
from compose.paths import TOOLS
from engine.errors import UserError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
PLUGIN_RELEASE = "trixie"  # the first Debian release whose docker-compose is version 2
PID_FILE = TOOLS / "dockerd.pid"
LOG_FILE = TOOLS / "dockerd.log"


class DockerError(UserError):
    """There is no container engine, or it cannot do what is needed."""


@cache
def environment() -> dict[str, str]:
    """Variables for every docker command: our own Compose where the machine has none."""
    return {} if _has_compose({}) else {"DOCKER_CONFIG": str(TOOLS / "docker")}


def docker(*words: str | Path, what: str, timeout_s: float = 120.0, both: bool = False) -> str:
    """The output of a docker command; raises CommandError."""
    command = ["docker", *words]
    return run(command, what=what, timeout_s=timeout_s, environment=environment(), both=both)


def is_running() -> bool:
    """Whether an engine answers."""
    if shutil.which("docker") is None:
        return False
    try:
        run(["docker", "version"], what="asking the container engine", timeout_s=30)
    except CommandError:
        return False
    return True


class Engine:
    """The container engine for the length of a run: a context manager.

    One that runs already is used and left alone. Else, as root, one is started, remembered by its
    process id, and ended at the end; one that an earlier run started and was killed before ending
    is taken over. Raises DockerError.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if not is_running():
            self._start()
        try:
            install_compose()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        if os.geteuid() != 0:
            raise DockerError(
                "no container engine answers: start Docker, join the group docker, or run this "
                "as root so that it can start one"
            )
        if shutil.which("dockerd") is None:
            debian.install(["docker.io", "iptables"], purpose="running containers")
        if shutil.which("docker") is None:  # a package of its own in newer releases
            debian.install(["docker-cli"], purpose="running containers")
        TOOLS.mkdir(parents=True, exist_ok=True)
        with LOG_FILE.open("wb") as log:
            self._process = subprocess.Popen(
                ["dockerd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        PID_FILE.write_text(str(self._process.pid))
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_running():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise DockerError(f"the container engine did not start; {LOG_FILE} says why")
            time.sleep(0.2)

    def close(self) -> None:
        """End the engine if a run of ours started it; idempotent."""
        pid = _started_pid()
        PID_FILE.unlink(missing_ok=True)
        if pid is None:
            return
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while _is_engine(pid):
            if self._process is not None:
                self._process.poll()
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _started_pid() -> int | None:
    try:
        pid = int(PID_FILE.read_text())
    except (OSError, ValueError):
        return None
    return pid if _is_engine(pid) else None


def _is_engine(pid: int) -> bool:
    try:
        is_zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        return not is_zombie and Path(f"/proc/{pid}/comm").read_text().strip() == "dockerd"
    except OSError:
        return False


def _has_compose(variables: dict[str, str]) -> bool:
    try:
        said = run(
            ["docker", "compose", "version", "--short"],
            what="asking for Compose",
            timeout_s=30,
            environment=variables,
        )
    except CommandError:
        return False
    return re.match(r"v?(\d+)", said.strip()) is not None


def install_compose() -> None:
    """Compose v2: the machine's own, or Debian's package unpacked for this checkout alone."""
    if _has_compose(environment()):
        return
    plugin = TOOLS / "docker" / "cli-plugins" / "docker-compose"
    if shutil.which("apt-get") is None:
        raise DockerError("Docker has no Compose: install its plugin docker-compose, version 2")
    package = debian.download("docker-compose", PLUGIN_RELEASE, TOOLS / "packages")
    run(
        ["dpkg-deb", "--extract", package, TOOLS / "unpacked"],
        what="unpacking Compose",
    )
    plugin.parent.mkdir(parents=True, exist_ok=True)
    found = next((TOOLS / "unpacked").rglob("cli-plugins/docker-compose"))
    shutil.copy2(found, plugin)
    if not _has_compose(environment()):
        raise DockerError(f"{plugin} does not run here: install Docker's Compose plugin, version 2")
