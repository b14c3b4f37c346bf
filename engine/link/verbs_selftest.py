"""``python -m engine.link.verbs_selftest``: a real RDMA WRITE, read back by a real RDMA READ.

Without ``--host`` both ends are queue pairs of one device here; with it, the other end is the
RNIC's side of the link there, and the bytes go into the port's first slot.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from typing import Any

from engine.link import LinkError
from engine.link.verbs_config import HANDSHAKE_PORT, VerbsConfig
from engine.link.verbs_device import VerbsDevice
from engine.link.verbs_errors import enums, pyverbs, verb
from engine.link.verbs_qp import QueuePair

NUM_BYTES = 6000  # more than one packet at every MTU
DEADLINE_S = 10.0


def loopback(config: VerbsConfig) -> str:
    """WRITE and READ between two queue pairs of this host's device; what was done, in words.

    Raises LinkError.
    """
    flags = enums()
    access = (
        flags.IBV_ACCESS_LOCAL_WRITE | flags.IBV_ACCESS_REMOTE_WRITE | flags.IBV_ACCESS_REMOTE_READ
    )
    with VerbsDevice(config) as device:
        target = device.register(NUM_BYTES, access)
        source = device.register(2 * NUM_BYTES, flags.IBV_ACCESS_LOCAL_WRITE)
        with (
            QueuePair(device, config, access=0) as here,
            QueuePair(device, config, access=access) as there,
        ):
            there.connect(here.facts())
            peer = there.facts(target)
            here.connect(peer)
            data = os.urandom(NUM_BYTES)
            ctypes.memmove(source.buf, data, NUM_BYTES)
            started = time.perf_counter()
            for opcode, start in (
                (flags.IBV_WR_RDMA_WRITE, 0),
                (flags.IBV_WR_RDMA_READ, NUM_BYTES),
            ):
                _transfer(here, opcode, source, start, peer.rkey, peer.address)
            took_us = (time.perf_counter() - started) * 1e6
            back = ctypes.string_at(source.buf + NUM_BYTES, NUM_BYTES)
            landed = ctypes.string_at(target.buf, NUM_BYTES)
            description = device.description
        source.close()
        target.close()
    if landed != data or back != data:
        raise LinkError(f"an RDMA WRITE over {description} arrived damaged")
    return f"{NUM_BYTES} bytes written and read back in {took_us:.0f} us over {description}"


def _transfer(
    queue_pair: QueuePair, opcode: int, region: Any, start: int, rkey: int, address: int
) -> None:
    wr = pyverbs("wr")
    element = wr.SGE(region.buf + start, NUM_BYTES, region.lkey)
    request = wr.SendWR(num_sge=1, sg=[element], opcode=opcode)
    request.set_wr_rdma(rkey, address)
    with verb("ibv_post_send"):
        queue_pair.qp.post_send(request)
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with verb("ibv_poll_cq"):
            count, completions = queue_pair.cq.poll(1)
        if count:
            if completions[0].status:
                raise LinkError(f"an RDMA operation ended with status {completions[0].status}")
            return
        time.sleep(1e-4)
    raise LinkError(f"no completion of an RDMA operation within {DEADLINE_S:g} s")


def to_host(host: str, tcp_port: int, config: VerbsConfig) -> str:
    """The same towards another machine's window; nothing else may be using the port."""
    from engine.link.verbs import connect_verbs

    link = connect_verbs(host, tcp_port, config=config).link
    try:
        data = os.urandom(min(NUM_BYTES, link.geometry.slot_bytes))
        offset = link.geometry.slot_offset(0)
        started = time.perf_counter()
        link.write([(offset, data)])
        back = link.read(offset, len(data))
        took_us = (time.perf_counter() - started) * 1e6
        if back != data:
            raise LinkError("an RDMA WRITE arrived damaged")
        done = f"{len(data)} bytes written and read back in {took_us:.0f} us"
        return f"{done}, {link.info.description}"
    finally:
        link.close()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m engine.link.verbs_selftest", description=__doc__
    )
    parser.add_argument("--host", default="", help="address of the RNIC's side; default: loopback")
    parser.add_argument("--port", type=int, default=HANDSHAKE_PORT, help="its TCP port")
    parser.add_argument("--verbs", default="{}", help="VerbsConfig as JSON")
    arguments = parser.parse_args()
    try:
        config = VerbsConfig.from_json(arguments.verbs)
        if arguments.host:
            text = to_host(arguments.host, arguments.port, config)
        else:
            text = loopback(config)
    except LinkError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    print(json.dumps({"ok": text}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
