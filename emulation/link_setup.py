"""What a stack's link needs before its processes start: the choice, and Soft-RoCE of the host.

The launcher loads this by name; nothing here takes part in serving.
"""

from __future__ import annotations

from pathlib import Path
from typing import Self

from emulation.probe import RXE, SHM, choose_link
from emulation.rxe import RxeLink
from emulation.vm.pair import make_window_file, sweep
from engine.config import ServeConfig
from engine.link.verbs_gid import choose_gid, read_gid_table

WINDOW_BYTES = 60 << 20  # ports and offer; sparse: only what is used takes memory


class LinkSetup:
    """`config` is the given one with the link chosen, why, and where its RNIC and window are.

    A context manager: what was made for the link goes at `close`, which is idempotent. Raises
    UserError where the asked-for link cannot work.
    """

    def __init__(self, config: ServeConfig, owner_pid: int) -> None:
        self._rxe: RxeLink | None = None
        self._window_path: Path | None = None
        choice = choose_link(config.link)
        self.config = config.replace(link=choice.link, link_reason=choice.reason)
        try:
            if choice.link != SHM:
                self._make_window(owner_pid)
            if choice.link == RXE:
                self._set_up_rxe()
        except BaseException:
            self.close()
            raise

    def _make_window(self, owner_pid: int) -> None:
        sweep()
        self._window_path = make_window_file(WINDOW_BYTES, owner_pid)
        window = self.config.window.replace(file=str(self._window_path))
        self.config = self.config.replace(window=window)

    def _set_up_rxe(self) -> None:
        rxe = self._rxe = RxeLink()
        rxe.set_up()
        gid = choose_gid(rxe.name, read_gid_table(rxe.name, 1))
        config = self.config
        self.config = config.replace(
            verbs=config.verbs.replace(device=config.verbs.device or rxe.name),
            rnic=config.rnic.replace(address=config.rnic.address or gid.address),
        )

    def close(self) -> None:
        """Take down what was set up."""
        if self._window_path is not None:
            self._window_path.unlink(missing_ok=True)
        if self._rxe is not None:
            self._rxe.tear_down()
            self._rxe = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
