"""The device as a process of its own: chains outlive their client, failures end clearly."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import emulation.cupysim as cp
from emulation.cupysim import device_control
from emulation.cupysim.cuda.export import SharedWindow
from emulation.cupysim.cuda.runtime import CUDARuntimeError
from emulation.cupysim.device import listen

DEADLINE_S = 15.0
WINDOW_BYTES = 4096
STEPS, STOP, ADDRESS = 0, 8, 16  # words of the window

# Two graphs that launch each other from the device until word STOP of the window is set.
CHAIN = r"""
extern "C" __global__ void step(volatile unsigned long long* window, const cudaGraphExec_t* next) {
  window[0] = window[0] + 1;
  __nanosleep(20000);
  if (window[8] == 0) cudaGraphLaunch(*next, cudaStreamGraphTailLaunch);
}
"""

HOST = f"""
import sys, time
import numpy as np
import emulation.cupysim as cp
from emulation.cupysim.cuda.export import SharedWindow

window = SharedWindow({WINDOW_BYTES}, path=sys.argv[1])
words = window.array.view(np.uint64)
step = cp.RawModule(code={CHAIN!r}).get_function("step")
following = cp.zeros(2, np.uint64)
stream = cp.cuda.Stream(non_blocking=True)
graphs = []
for index in range(2):
    with stream:
        stream.begin_capture()
        step((1,), (1,), (words, following[1 - index:]))
        graphs.append(stream.end_capture())
following.set(np.array([g.graphExec for g in graphs], np.uint64))
words[{ADDRESS}] = following.data.ptr
cp.cuda.Stream.null.synchronize()
graphs[0].launch(stream)
print("launched", flush=True)
if sys.argv[2] == "stay":
    time.sleep(600)
"""


def environment(**more: str) -> dict[str, str]:
    paths = [path or str(Path.cwd()) for path in sys.path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **more}


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.002)


class Device:
    """A device process of this test's own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.path = folder / "device"
        command = [sys.executable, "-m", "emulation.cupysim.device", "--socket", str(self.path)]
        self.process = subprocess.Popen(
            [*command, *options], env=environment(), stderr=subprocess.PIPE, text=True
        )
        wait_until(self.path.exists)

    def end(self) -> tuple[int, str]:
        """(exit status, stderr) once it has ended by itself."""
        _, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, errors

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A fresh device that this process's client uses during the test."""
    made = Device(tmp_path)
    device_control.disconnect()
    monkeypatch.setenv("CUPYSIM_DEVICE", str(made.path))
    yield made
    device_control.disconnect()
    made.close()


class Window:
    """The file behind an exported window, as a third process sees it."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "window"
        self.path.write_bytes(bytes(WINDOW_BYTES))
        with self.path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), WINDOW_BYTES)
        self.words = np.frombuffer(self._map, np.uint64)

    @property
    def steps(self) -> int:
        return int(self.words[STEPS])

    def advances(self) -> None:
        """Returns once a hundred more steps were made."""
        goal = self.steps + 100
        wait_until(lambda: self.steps >= goal)


def start_host(device: Device, window: Window, how: str) -> subprocess.Popen[str]:
    host = subprocess.Popen(
        [sys.executable, "-c", HOST, str(window.path), how],
        env=environment(CUPYSIM_DEVICE=str(device.path)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert host.stdout is not None
    assert host.stdout.readline() == "launched\n"
    return host


def process_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_chain_goes_on_while_its_client_is_frozen_and_after_it_is_killed(
    device: Device, tmp_path: Path
) -> None:
    window = Window(tmp_path)
    host = start_host(device, window, "stay")
    try:
        window.advances()
        host.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(host.pid) == "T")
        window.advances()
        window.advances()
    finally:
        host.kill()
        host.communicate(timeout=DEADLINE_S)
    window.advances()

    # A second client looks at the memory that the first one left behind.
    pointer = int(window.words[ADDRESS])
    memory = cp.cuda.UnownedMemory(pointer, 16, None)
    left = cp.ndarray((2,), np.uint64, cp.cuda.MemoryPointer(memory, 0))
    handles = left.get(cp.cuda.Stream(non_blocking=True))
    assert handles[0] != 0
    assert handles[0] != handles[1]

    # The chain stops when its memory says so; then the device is idle.
    window.words[STOP] = 1
    cp.cuda.Device().synchronize()
    steps = window.steps
    device_control.check()
    assert window.steps == steps
    device_control.shutdown()
    assert device.end() == (0, "")
    assert not device.path.exists()


def test_a_chain_goes_on_after_its_client_has_ended_by_itself(
    device: Device, tmp_path: Path
) -> None:
    window = Window(tmp_path)
    host = start_host(device, window, "leave")
    host.communicate(timeout=DEADLINE_S)
    assert host.returncode == 0
    window.advances()
    device.process.terminate()
    assert device.end() == (0, "")


def test_an_exception_in_a_chain_ends_the_device_and_says_why(device: Device) -> None:
    code = r"""
    extern "C" __global__ void countdown(int* left) {
      if (--*left == 0) __trap();
      cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
    }"""
    left = cp.asarray(np.array([5], np.int32))
    cp.cuda.Stream.null.synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        cp.RawKernel(code, "countdown")((1,), (1,), (left,))
        graph = stream.end_capture()
    graph.launch(stream)
    with pytest.raises(CUDARuntimeError, match=r"kernel countdown failed: .*__trap"):
        stream.synchronize()
    status, errors = device.end()
    assert status == 70
    assert errors.splitlines() == [
        "cupysim device: kernel countdown failed: the kernel called __trap()",
        "cupysim device: a graph failed, the device process ends",
    ]


class Broken:
    def forward(self, x: object) -> None:
        raise ZeroDivisionError("a model that fails")


def test_an_exception_in_a_python_kernel_shows_its_traceback(device: Device) -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    broken = cp.RawModule(path=f"{__name__}:Broken", backend="python").get_function("forward")
    with stream:
        stream.begin_capture()
        broken((1,), (1,), (cp.zeros(1),))
        graph = stream.end_capture()
    graph.launch(stream)
    with pytest.raises(CUDARuntimeError, match="forward raised ZeroDivisionError: a model that"):
        stream.synchronize()
    status, errors = device.end()
    assert status == 70
    assert "Traceback (most recent call last)" in errors
    assert "Broken.forward raised ZeroDivisionError: a model that fails" in errors


def test_an_error_outside_a_graph_is_sticky_and_the_device_stays(device: Device) -> None:
    trap = cp.RawKernel('extern "C" __global__ void trap() { __trap(); }', "trap")
    array = cp.zeros(1)
    trap((1,), (1,), ())
    with pytest.raises(CUDARuntimeError, match="cudaErrorLaunchFailure: kernel trap failed"):
        cp.cuda.Stream.null.synchronize()
    for use in (lambda: array.fill(1), array.get, lambda: cp.zeros(9000), device_control.check):
        with pytest.raises(CUDARuntimeError, match="cudaErrorLaunchFailure: kernel trap failed"):
            use()
    assert device.process.poll() is None


def test_an_address_outside_device_memory_is_an_error_of_the_device(device: Device) -> None:
    cp.cuda.runtime.memset(4096, 0, 16)
    with pytest.raises(CUDARuntimeError, match="0x1000 is not in device memory"):
        cp.cuda.Stream.null.synchronize()


def test_a_killed_device_is_reported_to_whoever_waits(device: Device) -> None:
    flag = cp.zeros(1, np.int32)
    code = 'extern "C" __global__ void hang(volatile int* f) { while (!*f) __nanosleep(100000); }'
    cp.RawKernel(code, "hang")((1,), (1,), (flag,))
    assert not cp.cuda.Stream.null.done
    device.process.kill()
    with pytest.raises(CUDARuntimeError, match=r"cudaErrorDevicesUnavailable.*has ended"):
        cp.cuda.Stream.null.synchronize()
    with pytest.raises(CUDARuntimeError, match="cudaErrorDevicesUnavailable"):
        cp.zeros(1)


def test_a_wild_pointer_ends_the_device_with_a_signal(device: Device) -> None:
    code = 'extern "C" __global__ void wild(volatile int* p) { *p = 1; }'
    cp.RawKernel(code, "wild")((1,), (1,), (64,))
    with pytest.raises(CUDARuntimeError, match="has ended"):
        cp.cuda.Stream.null.synchronize()
    status, errors = device.end()
    assert status == -signal.SIGSEGV
    assert "Segmentation fault" in errors


def test_an_idle_device_uses_no_cpu(device: Device) -> None:
    cp.zeros(4).get()
    cp.cuda.Stream(non_blocking=True).synchronize()
    before = cpu_ticks(device.process.pid)
    time.sleep(0.5)
    assert cpu_ticks(device.process.pid) - before <= 1


def test_a_private_device_ends_with_its_client() -> None:
    script = (
        "import os, sys, emulation.cupysim as cp\n"
        "from emulation.cupysim import device_control\n"
        "print(cp.ones(3).sum(), device_control.device_pid(), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    alone = environment()
    alone.pop("CUPYSIM_DEVICE", None)
    client = subprocess.Popen(
        [sys.executable, "-c", script],
        env=alone,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert client.stdout is not None
    total, pid = client.stdout.readline().split()
    assert total == "3.0"
    watched = os.pidfd_open(int(pid))
    client.kill()
    client.communicate(timeout=DEADLINE_S)
    ended, _, _ = select.select([watched], [], [], DEADLINE_S)
    os.close(watched)
    assert ended


def test_small_device_memory_runs_out_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Device(tmp_path, "--memory-bytes", str(1 << 20))
    device_control.disconnect()
    monkeypatch.setenv("CUPYSIM_DEVICE", str(made.path))
    try:
        half = cp.zeros(1 << 19, np.uint8)
        with pytest.raises(cp.cuda.memory.OutOfMemoryError, match=r"786,432 bytes \(524,288 of"):
            cp.zeros(3 << 18, np.uint8)
        half.fill(1)
        del half
        assert not cp.zeros(1 << 20, np.uint8).get().any()  # the pool's block was given back
    finally:
        device_control.disconnect()
        made.close()


def resident_bytes(pid: int) -> int:
    """Shared pages of the process that exist: device memory that is in use."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[2])
    return pages * mmap.PAGESIZE


def test_zeroed_memory_costs_nothing_until_it_is_used(device: Device) -> None:
    before = resident_bytes(device.process.pid)
    size = 64 << 20
    array = cp.full(size + 2, 7, np.uint8)[1 : size + 1]
    cp.cuda.Stream.null.synchronize()
    assert resident_bytes(device.process.pid) - before > size // 2
    cp.cuda.runtime.memset(array.data.ptr, 0, size)
    found = array.base
    assert found is not None
    whole = found.get()
    assert [int(n) for n in whole[[0, 1, size // 2, size, size + 1]]] == [7, 0, 0, 0, 7]
    assert not whole[1:-1].any()
    del array, found
    zeroed = cp.zeros(size, np.uint8)
    cp.cuda.Stream.null.synchronize()
    assert zeroed.nbytes == size
    assert resident_bytes(device.process.pid) - before < size // 2


def test_no_device_at_the_socket_says_how_to_start_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emulation.cupysim.client.CONNECT_TIMEOUT_S", 0.05)
    monkeypatch.setenv("CUPYSIM_DEVICE", str(tmp_path / "nobody"))
    device_control.disconnect()
    with pytest.raises(CUDARuntimeError, match=r"python -m emulation\.cupysim\.device --socket"):
        cp.zeros(1)


def test_a_socket_is_taken_over_from_the_dead_but_not_from_the_living(tmp_path: Path) -> None:
    path = tmp_path / "device"
    with listen(path), pytest.raises(OSError, match="listens at"):
        listen(path)
    assert path.exists()  # its owner is gone without removing it
    with listen(path), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(str(path))


# ---- exported windows ---------------------------------------------------------------------------


def test_a_window_is_shared_both_ways_and_holds_nothing_else() -> None:
    with SharedWindow(WINDOW_BYTES) as window:
        assert os.fstat(window.fd).st_size == WINDOW_BYTES
        outside = mmap.mmap(window.fd, WINDOW_BYTES)
        seen = np.frombuffer(outside, np.uint8)
        window.array[10:13] = cp.asarray(np.array([1, 2, 3], np.uint8))
        cp.cuda.Stream.null.synchronize()
        assert seen[9:14].tolist() == [0, 1, 2, 3, 0]
        np.frombuffer(outside, np.uint8)[100] = 9
        assert int(window.array[100]) == 9
        assert window.array.data.ptr == window.ptr


def test_a_window_lies_in_a_file_at_an_offset(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(mmap.PAGESIZE) + b"kept" + bytes(2 * mmap.PAGESIZE))
    with SharedWindow(mmap.PAGESIZE, path=path, offset=mmap.PAGESIZE) as window:
        assert window.array[:4].get().tobytes() == b"kept"
        window.array[4] = 33
        cp.cuda.Stream.null.synchronize()
    assert path.read_bytes()[mmap.PAGESIZE :][:5] == b"kept!"


def test_the_next_client_finds_the_windows_of_the_last_one(device: Device, tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(mmap.PAGESIZE) + b"kept" + bytes(mmap.PAGESIZE))
    window = SharedWindow(mmap.PAGESIZE, path=path, offset=mmap.PAGESIZE)
    device_control.disconnect()
    memory = cp.cuda.UnownedMemory(window.ptr, 4, None)
    found = cp.ndarray((4,), np.uint8, cp.cuda.MemoryPointer(memory, 0))
    assert found.get().tobytes() == b"kept"


def test_a_window_that_cannot_be_says_why(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    path.write_bytes(bytes(100))
    with pytest.raises(ValueError, match="100 bytes, the window needs 4096"):
        SharedWindow(4096, path=path)
    with pytest.raises(ValueError, match="multiple of"):
        SharedWindow(64, path=path, offset=8)
    with pytest.raises(ValueError, match="at least one byte"):
        SharedWindow(0)


def test_a_closed_window_is_closed_once_and_its_address_refused(device: Device) -> None:
    window = SharedWindow(WINDOW_BYTES)
    ptr = window.ptr
    window.close()
    window.close()
    cp.cuda.runtime.memset(ptr, 0, 16)
    with pytest.raises(CUDARuntimeError, match="is not in device memory"):
        cp.cuda.Stream.null.synchronize()


def test_a_large_request_arrives_whole() -> None:
    parts = [cp.full(2, index, np.int32) for index in range(1500)]
    joined = cp.concatenate(parts).get()
    np.testing.assert_array_equal(joined, np.repeat(np.arange(1500), 2))


def test_a_killed_private_device_tells_its_exit_status() -> None:
    script = (
        "import os, signal, emulation.cupysim as cp\n"
        "from emulation.cupysim import device_control\n"
        "os.kill(device_control.device_pid(), signal.SIGKILL)\n"
        "try:\n"
        "    cp.zeros(4).get()\n"
        "except cp.cuda.runtime.CUDARuntimeError as error:\n"
        "    print(error)\n"
    )
    alone = environment()
    alone.pop("CUPYSIM_DEVICE", None)
    done = subprocess.run(
        [sys.executable, "-c", script], env=alone, capture_output=True, text=True, timeout=30
    )
    assert "has ended by signal 9" in done.stdout


def test_threads_of_one_client_do_not_disturb_each_other() -> None:
    def work(seed: int) -> bool:
        with cp.cuda.Stream(non_blocking=True) as stream:
            for index in range(30):
                host = np.arange(200, dtype=np.int64) * seed + index
                array = cp.asarray(host)
                array += 1
                if not (array.get() == host + 1).all():
                    return False
            event = stream.record()
            event.synchronize()
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def _sum_in_child(count: int) -> int:
    return int(cp.arange(count).sum())


def test_a_forked_child_gets_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUPYSIM_DEVICE", raising=False)
    device_control.disconnect()
    kept = cp.ones(4)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(_sum_in_child, [5]) == [10]
    assert kept.tolist() == [1, 1, 1, 1]


def test_a_kernels_printf_reaches_the_devices_output() -> None:
    code = r'extern "C" __global__ void k(int n) { printf("n=%d\n", n); }'
    script = (
        "import emulation.cupysim as cp\n"
        f"cp.RawKernel({code!r}, 'k')((1,), (1,), (cp.int32(7),))\n"
        "cp.cuda.Stream.null.synchronize()\n"
    )
    alone = environment()
    alone.pop("CUPYSIM_DEVICE", None)
    done = subprocess.run(
        [sys.executable, "-c", script], env=alone, capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "n=7\n", done.stderr
