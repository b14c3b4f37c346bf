"""The base image: pulled; where that fails, made here from Debian's packages."""

from __future__ import annotations

import shutil

from compose import debian
from compose.command import CommandError, last_words, run
from compose.docker import docker
from compose.paths import REPOSITORY, TOOLS
from emulation.mirror import mirror

PULL_TIMEOUT_S = 120.0
DOCKERFILE = REPOSITORY / "compose" / "Dockerfile"
LEFT_OUT = ("/usr/share/man/*", "/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/info/*")


def base_tag() -> str:
    """The image that the Dockerfile begins with."""
    words = (line.split() for line in DOCKERFILE.read_text().splitlines())
    return next(line[1] for line in words if line and line[0] == "FROM")


def have_base_image() -> str:
    """Make sure that the base image is here; how it came, in words."""
    tag = base_tag()
    try:
        docker("image", "inspect", tag, what="looking for the base image")
        return f"{tag} was there"
    except CommandError:
        pass
    try:
        docker("pull", tag, what=f"pulling {tag}", timeout_s=PULL_TIMEOUT_S)
        return f"{tag} pulled"
    except CommandError as error:
        reason = last_words(str(error), 1)
    _make(tag)
    return f"{tag} made of Debian's packages ({reason})"


def _make(tag: str) -> None:
    """The same system, without an init system, from this machine's mirror, under the same tag."""
    release = tag.partition(":")[2].removesuffix("-slim")
    if shutil.which("mmdebstrap") is None:
        debian.install(["mmdebstrap"], purpose="making a base image")
    TOOLS.mkdir(parents=True, exist_ok=True)
    archive = TOOLS / "base.tar"
    options = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    options += ["--quiet", "--variant=minbase", "--format=tar", f"--keyring={debian.keyring()}"]
    words = ["mmdebstrap", *options, release, str(archive), mirror()]
    run(words, what="making a base image")
    docker("import", "--change", 'CMD ["bash"]', archive, tag, what="importing the base image")
    archive.unlink()
