"""Whether KVM really runs a guest here. /dev/kvm that opens proves nothing: on some hypervisors the
virtual processor spins for ever.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

from emulation.vm.image import Image
from emulation.vm.machine import QEMU, accelerator_arguments
from engine import native
from engine.errors import UserError

KVM = Path("/dev/kvm")
TRIAL_TIMEOUT_S = 15.0
MARK = "none starts"
"""What init says first when it was given no role."""


def usable_accelerator(wanted: str, image: Image) -> str:
    """ "kvm" or "tcg": `wanted`, or for "auto" KVM where a guest boots under it."""
    if wanted == "tcg":
        return "tcg"
    if wanted not in ("auto", "kvm"):
        raise UserError(f"accelerator={wanted!r}: there is auto, kvm and tcg")
    if kvm_boots(image):
        return "kvm"
    if wanted == "kvm":
        raise UserError(
            "no guest boots under KVM here within "
            f"{TRIAL_TIMEOUT_S:g} s; use software emulation (tcg), which works everywhere"
        )
    return "tcg"


def _verdict_path(image: Image) -> Path:
    facts = (platform.release(), platform.node(), str(image.kernel), str(KVM.exists()))
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:24]
    return native.cache_dir() / "vm" / f"kvm-verdict-{key}"


def kvm_boots(image: Image) -> bool:
    """Whether a guest reaches init under KVM within TRIAL_TIMEOUT_S; remembered."""
    if not os.access(KVM, os.R_OK | os.W_OK):
        return False
    verdict = _verdict_path(image)
    if verdict.exists():
        return verdict.read_text() == "boots"
    boots = _try_boot(image)
    partial = verdict.with_suffix(f".{os.getpid()}")
    partial.write_text("boots" if boots else "hangs")
    partial.replace(verdict)
    return boots


def _try_boot(image: Image) -> bool:
    with tempfile.TemporaryDirectory(prefix="blinkbed-kvm-") as folder:
        console = Path(folder) / "console.log"
        command = [QEMU, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
        command += ["-machine", "q35", *accelerator_arguments("kvm"), "-m", "1024"]
        command += ["-kernel", str(image.kernel), "-initrd", str(image.initramfs)]
        command += ["-append", "console=ttyS0 quiet panic=-1 bb.role=none bb.trial=1"]
        command += ["-serial", f"file:{console}"]
        try:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=TRIAL_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            pass
        return console.exists() and MARK in console.read_text(errors="replace")
