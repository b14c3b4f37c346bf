"""The staged link, with copies within this process in place of the GPU's copy engines."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from engine.cli import main
from engine.link import LinkError
from engine.link.staged import COPY_BYTES, StagedLink
from engine.protocol import FinishReason
from engine.ring import RequestParams
from tests.hostile_ring import make_driver
from tests.scheduler_driver import VOCAB_SIZE, Driver


class GoneError(Exception):
    """What a copier says whose memory is gone."""


class SlowCopier:
    """Nothing is copied before somebody waits; the device goes on between two copies."""

    lost_errors: tuple[type[Exception], ...] = (GoneError,)

    def __init__(self, port: np.ndarray, meanwhile: Callable[[], None]) -> None:
        self._port, self._meanwhile = port.ctypes.data, meanwhile
        self._buffers: list[ctypes.Array[ctypes.c_char]] = []
        self._begun: list[tuple[int, int, int]] = []
        self.is_gone = self.is_closed = False

    def allocate(self, nbytes: int) -> int:
        self._buffers.append(ctypes.create_string_buffer(nbytes))
        return ctypes.addressof(self._buffers[-1])

    def to_port(self, offset: int, address: int, nbytes: int) -> None:
        self._begun.append((self._port + offset, address, nbytes))

    def from_port(self, address: int, offset: int, nbytes: int) -> None:
        self._begun.append((address, self._port + offset, nbytes))

    def wait(self) -> None:
        if self.is_gone:
            raise GoneError("the GPU is gone")
        for to, source, nbytes in self._begun:
            ctypes.memmove(to, source, nbytes)
            self._meanwhile()
        self._begun.clear()

    def close(self) -> None:
        self.is_closed = True


def make_staged(driver: Driver) -> tuple[StagedLink, SlowCopier]:
    """Put a staged link under the driver's only client."""
    copier = SlowCopier(driver.host.port(), driver.step)
    link = StagedLink(copier, driver.memory.geometry, "test")
    driver.links[0] = driver.clients[0].link = link  # type: ignore[call-overload]
    return link, copier


def test_requests_through_copies_get_their_own_tokens() -> None:
    rng = random.Random(5)
    driver = make_driver()
    make_staged(driver)
    for number in range(200):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
        params = RequestParams(max_tokens=rng.randint(1, 20), seed=number)
        # The model must know the parameters before the device may see the record.
        driver.params[driver.clients[0]._free[-1]] = params
        driver.ask(params, prompt)
        if driver.clients[0].num_free_slots < 3:
            driver.run(1000)
    driver.run(1000)
    driver.check_answers()
    assert len(driver.done) == 200
    ends = {asked.reason for asked in driver.done}
    assert ends <= {FinishReason.STOP, FinishReason.LENGTH}


def test_a_long_read_comes_in_parts_and_in_order() -> None:
    driver = make_driver(num_slots=256, token_ring_entries=512)
    link, _ = make_staged(driver)
    start, size = link.geometry.slots_offset, 2 * COPY_BYTES + 5
    slots = driver.host.port()[start : start + size]  # what the device does not write
    slots[:] = np.random.default_rng(1).integers(0, 256, size, np.uint8)
    assert link.read(start, size) == slots.tobytes()


def test_ranges_outside_the_port_and_chains_that_are_too_long_are_refused() -> None:
    driver = make_driver(num_slots=256, token_ring_entries=512)
    link, _ = make_staged(driver)
    before = driver.host.port().copy()
    with pytest.raises(LinkError, match="outside the port"):
        link.write([(0, b"x" * 8), (link.geometry.port_bytes - 4, b"x" * 8)])
    with pytest.raises(LinkError, match="outside the port"):
        link.read(-1, 4)
    with pytest.raises(ValueError, match="longer than"):
        link.write([(link.geometry.slots_offset, b"x" * COPY_BYTES)] * 3)
    assert (driver.host.port() == before).all()


def test_a_gpu_that_is_gone_is_a_lost_link_for_good() -> None:
    driver = make_driver()
    link, copier = make_staged(driver)
    copier.is_gone = True
    with pytest.raises(LinkError, match="lost: the GPU is gone"):
        link.read(0, 64)
    copier.is_gone = False
    for use in (lambda: link.read(0, 64), lambda: link.read_tokens(0, 0.0)):
        with pytest.raises(LinkError, match="lost"):
            use()
    with pytest.raises(LinkError, match="lost"):
        link.write([(64, b"x")])
    link.close()
    link.close()
    assert not copier.is_closed  # nothing can be given back to a GPU that is gone


def test_a_closed_link_says_so() -> None:
    driver = make_driver()
    link, copier = make_staged(driver)
    link.close()
    assert copier.is_closed
    with pytest.raises(LinkError, match="closed"):
        link.read(0, 64)


def test_a_link_that_nobody_holds_is_gone_at_once() -> None:
    """No cycles: the collector would take apart in any order what has to go in one."""
    driver = make_driver()
    link = StagedLink(SlowCopier(driver.host.port(), driver.step), driver.memory.geometry, "test")
    assert not len(link.read_tokens(0, 0.0))
    watched = weakref.ref(link)
    gc.disable()
    try:
        del link
        assert watched() is None
    finally:
        gc.enable()


def test_no_tokens_is_an_empty_batch() -> None:
    driver = make_driver()
    link, _ = make_staged(driver)
    assert len(link.read_tokens(0, 0.01)) == 0


@pytest.mark.parametrize(
    "words", [[], ["--device", "cuda", "--path", "sync"], ["--device", "cuda", "--link", "vm"]]
)
def test_staging_needs_a_gpu_that_drives_itself(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", "scripted", "--window", "staged", *words]) != 0
    assert "--window staged needs --" in capfd.readouterr().err
