"""The shortest proof that the emulated machines do RDMA: one WRITE into the window, seen on the
host's side of it.
"""

from __future__ import annotations

import dataclasses
import json
import mmap

from emulation.vm.pair import RNIC, RNIC_ADDRESS, SMARTNIC, EmulatedPair
from engine import protocol
from engine.errors import UserError
from engine.link.verbs_offer import write_offer
from engine.protocol import Geometry

GEOMETRY = Geometry(num_slots=2, token_ring_entries=16, max_context=2048, vocab_size=2)
STEP_TIMEOUT_S = 60.0


def write_between_machines() -> str:
    """What was done, in words; UserError or AgentError when it did not work."""
    with EmulatedPair() as pair:
        with pair.window_path.open("r+b") as file:
            window = mmap.mmap(file.fileno(), pair.window_bytes, offset=pair.window_offset)
        offer = {
            "version": protocol.VERSION,
            "layout_hash": protocol.layout_hash(),
            "geometry": dataclasses.asdict(GEOMETRY),
            "port_bytes": GEOMETRY.port_bytes,
            "num_ports": 1,
            "epoch": 0,
            "window": "nvdimm",
        }
        with memoryview(window) as view:
            write_offer(view, offer)
        rnic = pair.start(RNIC, ["python3", "-S", "-m", "engine.link.rnic", *RNIC_ARGUMENTS])
        said = json.loads(rnic.read_line(STEP_TIMEOUT_S))
        if said["event"] != "ready":
            raise UserError(f"the RNIC's machine does not serve: {said}")
        selftest = ["python3", "-S", "-m", "engine.link.verbs_selftest", "--host", RNIC_ADDRESS]
        process = pair.start(SMARTNIC, selftest)
        process.wait(STEP_TIMEOUT_S)
        answer = json.loads(process.output.strip().splitlines()[-1])
        if "error" in answer:
            raise UserError(answer["error"])
        start = GEOMETRY.slot_offset(0)
        landed = any(window[start : start + 64])
        window.close()
        if not landed:
            raise UserError("an RDMA WRITE did not arrive in the window's file")
        how = "KVM" if pair.accelerator == "kvm" else "software emulation"
        return f"{answer['ok']}; ready after {pair.ready_after_s:.1f} s under {how}"


RNIC_ARGUMENTS = ("--window", "/dev/dax0.0", "--listen", RNIC_ADDRESS)
