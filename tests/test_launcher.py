"""The launcher from outside: starts, failures, deaths of each process, and the drain."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from engine.demo.stream import ChatStream
from engine.freeze import Freeze, process_state
from engine.runtime_dir import PREFIX
from engine.stack import Stack, StackError
from tests.chat_client import get, scripted_canary
from tests.server import (
    READY_TIMEOUT_S,
    Server,
    flag_words,
    is_alive,
    processes_naming,
    start_server,
    wait_until,
)


@pytest.fixture
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Runtime folders go below tmp_path; at the end there are none, nor processes."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield tmp_path
    assert list(tmp_path.glob(f"{PREFIX}*")) == []
    assert processes_naming(str(tmp_path)) == []


def start_failure(environment: dict[str, str] | None = None, **flags: object) -> str:
    """Start a stack that cannot start; all of its stderr, after the exit status was checked."""
    words = flag_words({"port": 0, "model": "scripted", **flags})
    stack = Stack(words, environment=environment)
    with pytest.raises(StackError):
        stack.wait_ready(READY_TIMEOUT_S)
    assert stack.process.returncode == 1
    errors = "\n".join(stack.messages)
    assert "Traceback" not in errors
    return stack.messages[-1]


def start_long_server() -> AbstractContextManager[Server]:
    """With context enough for an answer of the scripted model that lasts for seconds."""
    return start_server(max_context=65536, num_pages=8192, token_ring_entries=1024)


@contextmanager
def streaming(server: Server, max_tokens: int) -> Iterator[ChatStream]:
    """A streamed answer under way in a thread."""
    stream = ChatStream("abcdefgh", max_tokens, ignore_eos=True)
    worker = threading.Thread(target=stream.run, args=(server.url, server.ready.model))
    worker.start()
    wait_until(lambda: stream.num_tokens > 0 or stream.error, 10, "first token")
    try:
        yield stream
    finally:
        worker.join(60)


def has_said(server: Server, words: str) -> bool:
    return any(words in line for line in server.log)


def kill_smartnic(server: Server) -> None:
    """SIGKILL to this server's SmartNIC process, also to one that was started later."""
    for pid in processes_naming("engine.smartnic"):
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        if int(stat.rpartition(")")[2].split()[1]) == server.pids["launcher"]:
            os.kill(pid, signal.SIGKILL)


def wait_for_restart(server: Server, times: int) -> None:
    def is_done() -> bool:
        return sum("started again" in line for line in server.log) == times

    wait_until(is_done, 20, f"restart {times}")


def wait_for_end(pid: int) -> None:
    wait_until(lambda: not is_alive(pid), 10, f"end of process {pid}")


def named_shared_memory(server: Server) -> list[str]:
    """Files in /dev/shm that a process of the stack has mapped."""
    lines: list[str] = []
    for pid in server.pids.values():
        lines += Path(f"/proc/{pid}/maps").read_text().splitlines()
    return [line for line in lines if " /dev/shm/" in line]


@pytest.mark.usefixtures("nothing_left")
def test_two_stacks_live_side_by_side() -> None:
    with start_server() as one, start_server() as two:
        assert one.url != two.url
        assert scripted_canary(one.url) == scripted_canary(two.url) == "canary"
        assert set(one.pids.values()).isdisjoint(two.pids.values())
        assert named_shared_memory(one) == []  # what has no name cannot be left behind
        assert one.stack.stop() == 0
        assert scripted_canary(two.url) == "canary"
        assert two.stack.stop() == 0


@pytest.mark.usefixtures("nothing_left")
def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = start_failure(port=port)
    assert f"127.0.0.1:{port}" in sentence
    assert "--port" in sentence


@pytest.mark.usefixtures("nothing_left")
def test_an_address_of_another_machine_is_named() -> None:
    assert "192.0.2.1" in start_failure(host="192.0.2.1")


@pytest.mark.usefixtures("nothing_left")
def test_a_missing_model_is_named() -> None:
    assert "/no/such/model.gguf" in start_failure(model="/no/such/model.gguf")


def test_a_file_that_is_no_model_is_named(nothing_left: Path) -> None:
    path = nothing_left / "poem.gguf"
    path.write_text("no weights here")
    assert "poem.gguf" in start_failure(model=path)


def test_a_missing_compiler_is_named(nothing_left: Path) -> None:
    environment = {"CXX": "/no/such/compiler", "BLINKBED_CACHE": str(nothing_left / "cache")}
    sentence = start_failure(environment)
    assert "compiler" in sentence
    assert "/no/such/compiler" in sentence


@pytest.mark.usefixtures("nothing_left")
def test_too_little_memory_is_named() -> None:
    sentence = start_failure(memory_mib=1, num_pages=4096)
    assert "memory" in sentence.lower()


@pytest.mark.usefixtures("nothing_left")
def test_sigterm_lets_running_answers_end() -> None:
    with start_long_server() as server, streaming(server, 20_000) as stream:
        assert not stream.is_over
        status = server.stack.stop()
    assert status == 0
    assert stream.error is None
    assert stream.finish_reason == "length"
    assert stream.num_tokens == 20_000
    assert get(f"{server.url}/livez") == (0, b"")


@pytest.mark.usefixtures("nothing_left")
def test_sigterm_reaches_a_frozen_host_too() -> None:
    with start_server() as server:
        os.kill(server.pids["host"], signal.SIGSTOP)
        wait_until(lambda: process_state(server.pids["host"]) == "T", 5, "host in state T")
        assert server.stack.stop() == 0


@pytest.mark.usefixtures("nothing_left")
def test_a_killed_smartnic_is_started_again_on_the_same_port() -> None:
    with start_server() as server:
        for times in range(1, 3):
            kill_smartnic(server)
            wait_for_restart(server, times)
            wait_until(lambda: get(f"{server.url}/readyz")[0] == 200, 30, "ready again")
            assert scripted_canary(server.url) == "canary"
        assert server.stack.stop() == 0


@pytest.mark.usefixtures("nothing_left")
def test_a_stop_signal_that_comes_twice_at_once_still_drains() -> None:
    with start_long_server() as server, streaming(server, 30_000) as stream:
        os.kill(server.pids["launcher"], signal.SIGTERM)
        os.kill(server.pids["launcher"], signal.SIGTERM)
        wait_until(lambda: stream.is_over, 30, "the answer to end")
        assert stream.error is None
        process = server.stack.process
        wait_until(lambda: process.poll() is not None, 20, "the launcher's end")
        assert process.returncode == 0


@pytest.mark.usefixtures("nothing_left")
def test_serving_goes_on_without_the_host() -> None:
    with start_server() as server:
        os.kill(server.pids["host"], signal.SIGKILL)
        wait_until(lambda: has_said(server, "serving goes on"), 10, "message")
        assert scripted_canary(server.url) == "canary"
        assert get(f"{server.url}/readyz")[0] == 200
        assert server.stack.stop() == 0


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_smartnic_comes_back_without_the_host(how: signal.Signals) -> None:
    with start_server() as server:
        os.kill(server.pids["host"], how)
        kill_smartnic(server)
        wait_for_restart(server, 1)
        wait_until(lambda: get(f"{server.url}/readyz")[0] == 200, 30, "ready again")
        assert scripted_canary(server.url) == "canary"
        assert server.stack.stop() == 0


@pytest.mark.usefixtures("nothing_left")
def test_a_host_that_is_told_to_stop_stops_the_device_and_the_launcher_says_so() -> None:
    with start_server() as server:
        os.kill(server.pids["host"], signal.SIGTERM)
        wait_until(lambda: get(f"{server.url}/readyz")[0] == 503, 10, "/readyz 503")
        wait_until(lambda: has_said(server, "was told to stop"), 10, "message")
        assert server.stack.stop() == 1


@pytest.mark.usefixtures("nothing_left")
def test_serving_goes_on_while_host_and_launcher_are_frozen() -> None:
    with start_server() as server:
        with Freeze((server.pids["host"], server.pids["launcher"])) as freeze:
            assert scripted_canary(server.url) == "canary"
            assert freeze.holds()
        assert server.stack.stop() == 0


@pytest.mark.usefixtures("nothing_left")
def test_a_killed_device_ends_requests_with_an_error_and_a_bad_exit_status() -> None:
    with start_long_server() as server:
        with streaming(server, 60_000) as stream:
            os.kill(server.pids["device"], signal.SIGKILL)
            wait_until(lambda: get(f"{server.url}/readyz")[0] == 503, 5, "/readyz 503")
            wait_until(lambda: stream.is_over, 5, "the answer to end")
        assert stream.error is not None
        assert get(f"{server.url}/livez")[0] == 200
        wait_until(lambda: has_said(server, "device process ended"), 5, "message")
        assert server.stack.stop() == 1


def test_all_processes_die_with_a_killed_launcher(tmp_path: Path) -> None:
    with start_server(environment={"TMPDIR": str(tmp_path)}) as server:
        os.kill(server.pids["launcher"], signal.SIGKILL)
        for role in ("smartnic", "host", "device"):
            wait_for_end(server.pids[role])


@pytest.mark.usefixtures("nothing_left")
def test_an_interrupted_start_leaves_nothing() -> None:
    stack = Stack(flag_words({"port": 0, "model": "scripted"}))
    wait_until(lambda: stack.messages, 30, "first message")
    stack.process.send_signal(signal.SIGINT)
    assert stack.process.wait(20) == 130
    stack.close()
