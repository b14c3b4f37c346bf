"""Memory of the processes under load: ``python -m loadtests.bench_memory``.

Of the device process what is beyond weights and KV cache: those lie in the simulated device
memory, which is shared memory and counted as such by the kernel (RssShmem), so the rest of its
resident set is the figure. Of the SmartNIC its whole resident set.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from engine.demo.stream import ChatStream
from engine.errors import UserError
from engine.stack import Stack

READY_TIMEOUT_S = 900.0
NUM_REQUESTS = 8
MAX_TOKENS = 48


def resident_mb(pid: int) -> dict[str, float]:
    """The kernel's accounts of a process in MB (10^6 bytes): VmRSS, RssShmem, ..."""
    accounts = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if value.endswith(" kB"):
            accounts[key] = int(value.split()[0]) * 1024 / 1e6
    return accounts


def measure(model: str = "smollm2") -> dict[str, float]:
    """Start a stack, stream some answers, and look."""
    with Stack([f"--model={model}", "--port=0"]) as stack:
        ready = stack.wait_ready(READY_TIMEOUT_S)
        streams = [
            ChatStream(f"Tell me about the number {n}.", MAX_TOKENS) for n in range(NUM_REQUESTS)
        ]
        threads = [
            threading.Thread(target=stream.run, args=(ready.url, ready.model)) for stream in streams
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for stream in streams:
            if stream.error is not None:
                raise UserError(f"a request failed: {stream.error}")
        device, smartnic = resident_mb(ready.device_pid), resident_mb(ready.smartnic_pid)
    return {
        "device_mb": device["VmRSS"],
        "device_memory_mb": device["RssShmem"],
        "device_beyond_mb": device["VmRSS"] - device["RssShmem"],
        "smartnic_mb": smartnic["VmRSS"],
    }


if __name__ == "__main__":
    try:
        print(json.dumps(measure()))
    except UserError as error:
        sys.exit(f"bench_memory: {error}")
