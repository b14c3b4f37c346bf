"""Which link the containers use: the best one that this host can do, and why."""

from __future__ import annotations

import stat

from emulation.probe import LINKS, choose_link
from emulation.vm.accelerator import KVM, usable_accelerator
from emulation.vm.image import build_image

CHOICES = ("auto", *LINKS)


def choose(wanted: str) -> tuple[str, str]:
    """The link and the reason for it; raises UserError when the asked-for link cannot work."""
    choice = choose_link(wanted)
    return choice.link, choice.reason


def accelerator() -> dict[str, str]:
    """What compose.yaml needs to know of KVM: nothing unless a guest really boots under it here,
    and containers, which are not root, may open it.
    """
    if usable_accelerator("auto", build_image()) != "kvm":
        return {}
    status = KVM.stat()
    if not status.st_mode & stat.S_IRWXG:
        return {}
    return {
        "BLINKBED_ACCELERATOR": "kvm",
        "BLINKBED_KVM": str(KVM),
        "BLINKBED_KVM_GROUP": str(status.st_gid),
    }
