"""Streams, events, graphs and device-side launch on the simulated GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import emulation.cupysim as cp
from emulation.cupysim import device_control
from emulation.cupysim.cuda.runtime import CUDARuntimeError

DEADLINE_S = 10.0

CODE = r"""
// Appends `who` to a log: log[0] counts.
extern "C" __global__ void note(unsigned long long* log, unsigned long long who) {
  log[1 + log[0]++] = who;
}

// Spins (politely) until another stream raises the flag.
extern "C" __global__ void wait_for(volatile int* flag) {
  while (*flag == 0) __nanosleep(1000);
}
extern "C" __global__ void raise_flag(volatile int* flag) { *flag = 1; }

// A step's last node: notes itself and launches the other graph until `limit` notes are made.
extern "C" __global__ void step(unsigned long long* log, const cudaGraphExec_t* next,
                                unsigned long long who, unsigned long long limit) {
  log[1 + log[0]++] = who;
  if (log[0] < limit) cudaGraphLaunch(*next, cudaStreamGraphTailLaunch);
}

extern "C" __global__ void launch(const cudaGraphExec_t* graphs, int count, int forget,
                                  int* results) {
  for (int i = 0; i < count; ++i)
    results[i] = cudaGraphLaunch(
        graphs[i], forget ? cudaStreamGraphFireAndForget : cudaStreamGraphTailLaunch);
}

extern "C" __global__ void relaunch_self(int* left) {
  if (--*left > 0) cudaGraphLaunch(cudaGetCurrentGraphExec(), cudaStreamGraphTailLaunch);
}
"""

ONE = ((1,), (1,))


@pytest.fixture(scope="module")
def kernels() -> Callable[[str], Any]:
    return cp.RawModule(code=CODE).get_function


def new_log(size: int = 64) -> Any:
    log = cp.zeros(size, np.uint64)
    cp.cuda.Stream.null.synchronize()  # other streams here are non-blocking
    return log


def notes(log: Any, stream: Any = None) -> list[int]:
    found = log.get(stream)
    return [int(who) for who in found[1 : 1 + int(found[0])]]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.001)


def capture(stream: Any, *launches: Callable[[], object]) -> Any:
    with stream:
        stream.begin_capture()
        for launch in launches:
            launch()
        return stream.end_capture()


# ---- streams and events ---------------------------------------------------------------------


def test_a_stream_runs_in_order_and_its_neighbours_do_not_wait(kernels: Any) -> None:
    log, flag = new_log(), cp.zeros(1, np.int32)
    cp.cuda.Stream.null.synchronize()
    slow: Any = cp.cuda.Stream(non_blocking=True)
    quick = cp.cuda.Stream(non_blocking=True)
    with slow:
        kernels("wait_for")(*ONE, (flag,))
        kernels("note")(*ONE, (log, np.uint64(2)))
    with quick:
        kernels("note")(*ONE, (log, np.uint64(1)))
    quick.synchronize()
    assert not slow.done
    assert notes(log, quick) == [1]
    with quick:
        kernels("raise_flag")(*ONE, (flag,))
    slow.synchronize()
    assert slow.done
    assert notes(log, slow) == [1, 2]


def test_the_null_stream_and_blocking_streams_wait_for_each_other(kernels: Any) -> None:
    log, flag = new_log(), cp.zeros(1, np.int32)
    cp.cuda.Stream.null.synchronize()
    blocking, free = cp.cuda.Stream(), cp.cuda.Stream(non_blocking=True)
    with blocking:
        kernels("wait_for")(*ONE, (flag,))
        kernels("note")(*ONE, (log, np.uint64(1)))
    kernels("note")(*ONE, (log, np.uint64(2)))
    with blocking:
        kernels("note")(*ONE, (log, np.uint64(3)))
    with free:
        kernels("raise_flag")(*ONE, (flag,))
    blocking.synchronize()
    assert notes(log) == [1, 2, 3]


def test_an_event_orders_two_streams_and_measures_time(kernels: Any) -> None:
    log, flag = new_log(), cp.zeros(1, np.int32)
    cp.cuda.Stream.null.synchronize()
    first, second, third = (cp.cuda.Stream(non_blocking=True) for _ in range(3))
    start = first.record()
    with first:
        kernels("wait_for")(*ONE, (flag,))
        kernels("note")(*ONE, (log, np.uint64(1)))
    end = first.record()
    second.wait_event(end)
    with second:
        kernels("note")(*ONE, (log, np.uint64(2)))
    start.synchronize()
    assert start.done
    assert not end.done
    with pytest.raises(CUDARuntimeError, match="cudaErrorNotReady"):
        cp.cuda.get_elapsed_time(start, end)
    with third:
        kernels("raise_flag")(*ONE, (flag,))
    second.synchronize()
    end.synchronize()
    assert notes(log, second) == [1, 2]
    assert 0 < cp.cuda.get_elapsed_time(start, end) < DEADLINE_S * 1000


def test_an_event_that_was_never_recorded_is_done() -> None:
    event = cp.cuda.Event()
    assert event.done
    event.synchronize()
    cp.cuda.Stream(non_blocking=True).wait_event(event)


def test_with_and_use_choose_the_current_stream() -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    assert cp.cuda.get_current_stream() == cp.cuda.Stream.null
    with stream:
        assert cp.cuda.get_current_stream() is stream
        with cp.cuda.Stream.null:
            assert cp.cuda.get_current_stream().ptr == 0
    assert cp.cuda.get_current_stream() == cp.cuda.Stream.null
    stream.use()
    assert cp.cuda.get_current_stream() is stream
    cp.cuda.Stream.null.use()


def test_array_operations_and_transfers_follow_the_current_stream(kernels: Any) -> None:
    flag, value = cp.zeros(1, np.int32), cp.zeros(1, np.int32)
    cp.cuda.Stream.null.synchronize()
    stream, other = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    with stream:
        kernels("wait_for")(*ONE, (flag,))
        value += 1
        value.set(value.dtype.type(41) * np.ones(1, np.int32))
        value += 1
    assert value.get(other).tolist() == [0]
    with other:
        flag.fill(1)
    assert value.get(stream).tolist() == [42]


def test_the_device_waits_for_all_streams(kernels: Any) -> None:
    log = new_log()
    for who in range(3):
        with cp.cuda.Stream(non_blocking=True):
            kernels("note")(*ONE, (log, np.uint64(who)))
            cp.cuda.Device().synchronize()
    assert notes(log) == [0, 1, 2]


# ---- capture and replay -----------------------------------------------------------------------


def test_a_captured_graph_runs_when_it_is_launched_and_every_time(kernels: Any) -> None:
    log = new_log()
    stream = cp.cuda.Stream(non_blocking=True)
    total = cp.zeros(1, np.uint64)
    cp.cuda.Stream.null.synchronize()

    def add() -> None:
        cp.add(total, log[:1], out=total)

    graph = capture(stream, lambda: kernels("note")(*ONE, (log, np.uint64(7))), add)
    assert notes(log, stream) == []
    for _ in range(3):
        graph.launch(stream)
    assert notes(log, stream) == [7, 7, 7]
    assert total.get(stream).tolist() == [1 + 2 + 3]


def test_a_capture_follows_events_into_other_streams_and_back(kernels: Any) -> None:
    log = new_log()
    main, side = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    with main:
        main.begin_capture()
        kernels("note")(*ONE, (log, np.uint64(1)))
        side.wait_event(main.record())
        assert side.is_capturing()
        with side:
            kernels("note")(*ONE, (log, np.uint64(2)))
        main.wait_event(side.record())
        kernels("note")(*ONE, (log, np.uint64(3)))
        graph = main.end_capture()
    assert not side.is_capturing()
    graph.launch(main)
    assert notes(log, main) == [1, 2, 3]


def test_a_fork_that_is_not_joined_is_an_error(kernels: Any) -> None:
    log = new_log()
    main, side = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    main.begin_capture()
    side.wait_event(main.record())
    with side:
        kernels("note")(*ONE, (log, np.uint64(2)))
    with pytest.raises(CUDARuntimeError, match="cudaErrorStreamCaptureUnjoined"):
        main.end_capture()
    assert not side.is_capturing()


def test_what_a_capture_cannot_hold_is_refused() -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    outside = cp.cuda.Stream(non_blocking=True).record()
    array = cp.zeros(1)
    with pytest.raises(RuntimeError, match="default"):
        cp.cuda.Stream.null.begin_capture()
    with pytest.raises(CUDARuntimeError, match="cudaErrorStreamCaptureInvalidated"):
        stream.end_capture()
    stream.begin_capture()
    for refused in (
        stream.synchronize,
        stream.begin_capture,
        lambda: array.get(stream),
        lambda: stream.wait_event(outside),
    ):
        with pytest.raises(CUDARuntimeError, match="cudaErrorStreamCapture"):
            refused()
    stream.end_capture().launch(stream)
    stream.synchronize()


def test_a_graph_may_hold_another_graph(kernels: Any) -> None:
    log = new_log()
    stream = cp.cuda.Stream(non_blocking=True)
    inner = capture(stream, lambda: kernels("note")(*ONE, (log, np.uint64(2))))
    outer = capture(
        stream,
        lambda: kernels("note")(*ONE, (log, np.uint64(1))),
        lambda: inner.launch(),
        lambda: kernels("note")(*ONE, (log, np.uint64(3))),
    )
    outer.launch(stream)
    assert notes(log, stream) == [1, 2, 3]


def test_a_graph_that_is_dropped_after_its_launch_still_runs(kernels: Any) -> None:
    log, flag = new_log(), cp.zeros(1, np.int32)
    cp.cuda.Stream.null.synchronize()
    stream, other = (cp.cuda.Stream(non_blocking=True) for _ in range(2))
    graph = capture(stream, lambda: kernels("note")(*ONE, (log, np.uint64(4))))
    with stream:
        kernels("wait_for")(*ONE, (flag,))
    graph.launch(stream)
    del graph
    with other:
        kernels("raise_flag")(*ONE, (flag,))
    assert notes(log, stream) == [4]


# ---- launches from the device -------------------------------------------------------------------


def handles(*graphs: Any) -> Any:
    array = cp.asarray(np.array([graph.graphExec for graph in graphs], np.uint64))
    cp.cuda.Stream.null.synchronize()
    return array


def test_two_graphs_launch_each_other_from_the_device(kernels: Any) -> None:
    log, next_graph = new_log(), cp.zeros(2, np.uint64)
    cp.cuda.Stream.null.synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    step, limit = kernels("step"), np.uint64(20)
    even = capture(stream, lambda: step(*ONE, (log, next_graph[1:], np.uint64(0), limit)))
    odd = capture(stream, lambda: step(*ONE, (log, next_graph[:1], np.uint64(1), limit)))
    next_graph.set(np.array([even.graphExec, odd.graphExec], np.uint64), stream)
    runs, launches = device_control.graph_counters()
    even.launch(stream)
    with stream:
        kernels("note")(*ONE, (log, np.uint64(9)))  # waits for the end of the whole chain
    assert notes(log, stream) == [0, 1] * 10 + [9]
    assert device_control.graph_counters() == (runs + 20, launches + 19)


def test_tail_launches_run_depth_first_after_their_graph(kernels: Any) -> None:
    log = new_log()
    stream = cp.cuda.Stream(non_blocking=True)
    results = cp.zeros(4, np.int32)

    def leaf(who: int) -> Any:
        return capture(stream, lambda: kernels("note")(*ONE, (log, np.uint64(who))))

    leaves = [leaf(2), leaf(3), leaf(4)]
    one_leaf, first_leaf = handles(leaves[2]), handles(leaves[0])
    no_forget = np.int32(0)
    branch = capture(
        stream,
        lambda: kernels("launch")(*ONE, (one_leaf, np.int32(1), no_forget, results)),
        lambda: kernels("note")(*ONE, (log, np.uint64(1))),
    )
    two = handles(branch, leaves[1])
    root = capture(
        stream,
        lambda: kernels("launch")(*ONE, (two, np.int32(2), no_forget, results)),
        lambda: kernels("note")(*ONE, (log, np.uint64(0))),
    )
    root.launch(stream)
    assert notes(log, stream) == [0, 1, 4, 3]
    assert first_leaf.get().tolist() == [leaves[0].graphExec]


def test_a_fire_and_forget_launch_ends_before_the_tail_launches(kernels: Any) -> None:
    log, results = new_log(), cp.zeros(1, np.int32)
    stream = cp.cuda.Stream(non_blocking=True)
    leaf = capture(stream, lambda: kernels("note")(*ONE, (log, np.uint64(5))))
    tail = capture(stream, lambda: kernels("note")(*ONE, (log, np.uint64(6))))
    leaf_handle, tail_handle = handles(leaf), handles(tail)
    one = np.int32(1)
    root = capture(
        stream,
        lambda: kernels("launch")(*ONE, (tail_handle, one, np.int32(0), results)),
        lambda: kernels("launch")(*ONE, (leaf_handle, one, one, results)),
    )
    for _ in range(5):
        root.launch(stream)
    assert notes(log, stream) == [5, 6] * 5


def test_a_graph_relaunches_itself(kernels: Any) -> None:
    left = cp.asarray(np.array([1000], np.int32))
    cp.cuda.Stream.null.synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    graph = capture(stream, lambda: kernels("relaunch_self")(*ONE, (left,)))
    graph.launch(stream)
    assert left.get(stream).tolist() == [0]


def test_invented_and_stale_handles_are_refused_by_the_device(kernels: Any) -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    log, results = new_log(), cp.zeros(3, np.int32)
    stale = capture(stream, lambda: kernels("note")(*ONE, (log, np.uint64(1)))).graphExec
    cp.cuda.Stream.null.synchronize()
    bad = cp.asarray(np.array([stale, 0, 2**63 + 12345], np.uint64))
    cp.cuda.Stream.null.synchronize()
    graph = capture(
        stream, lambda: kernels("launch")(*ONE, (bad, np.int32(3), np.int32(0), results))
    )
    graph.launch(stream)
    assert results.get(stream).tolist() == [1, 1, 1]  # cudaErrorInvalidValue
    assert notes(log, stream) == []


def test_only_a_kernel_in_a_graph_may_launch_from_the_device(kernels: Any) -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    log, results = new_log(), cp.zeros(1, np.int32)
    graph = capture(stream, lambda: kernels("note")(*ONE, (log, np.uint64(1))))
    one_handle = handles(graph)
    with stream:
        kernels("launch")(*ONE, (one_handle, np.int32(1), np.int32(0), results))
    assert results.get(stream).tolist() == [801]  # cudaErrorNotSupported
    assert notes(log, stream) == []


# ---- Python-backed kernels in graphs -------------------------------------------------------------


class Doubler:
    """Backend 'python': the simulator's counterpart of a library kernel."""

    def forward(self, log: Any) -> None:
        count = int(log[0])
        log[1 + count] = 2 * log[count]
        log[0] += 1


def test_a_python_kernel_runs_in_a_chain_beside_native_ones(kernels: Any) -> None:
    doubler = cp.RawModule(path=f"{__name__}:Doubler", backend="python").get_function("forward")
    log, next_graph = new_log(), cp.zeros(1, np.uint64)
    cp.cuda.Stream.null.synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    graph = capture(
        stream,
        lambda: kernels("note")(*ONE, (log, np.uint64(5))),
        lambda: doubler(*ONE, (log,)),
        lambda: kernels("step")(*ONE, (log, next_graph, np.uint64(1), np.uint64(9))),
    )
    next_graph.set(np.array([graph.graphExec], np.uint64), stream)
    graph.launch(stream)
    assert notes(log, stream) == [5, 10, 1] * 3
