"""The launcher: starts device, host and SmartNIC, watches them, and drains them in order.

It takes no part in serving. Once the ready line is out it only waits for signals and deaths, so
it may be stopped as the host may be, and tokens keep coming.
"""

from __future__ import annotations

import importlib
import os
import selectors
import signal
import socket
import sys
import time
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Protocol, Self

from engine.available_memory import available_memory_bytes
from engine.child import Child
from engine.config import ServeConfig
from engine.errors import UserError
from engine.handshake import HandshakeServer, Offer, fetch_offer
from engine.ready import ReadyLine
from engine.runtime_dir import RuntimeDir

DEVICE_MODULES = {"sim": "emulation.cupysim.device", "cuda": ""}
"""What stands for the GPU as a process; a real one needs none: its loop is the host process's."""
LINK_SETUP = "emulation.link_setup"
MACHINE_MODULE = "emulation.vm.child"
READY_TIMEOUT_S = {"rnic": 600.0, "host": 900.0, "smartnic": 120.0}
RESTARTED = ("rnic", "smartnic")
STOP_TIMEOUT_S = 15.0
RESTART_DELAYS_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
STABLE_AFTER_S = 30.0  # a SmartNIC that lived this long starts again at the first delay
SAME_STOP_S = 0.5
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class LaunchError(UserError):
    """The stack could not be started; the message says why."""


class Interrupted(KeyboardInterrupt):
    """A stop signal came before the stack was ready."""


@dataclass(frozen=True, slots=True)
class Modules:
    """The Python modules that the children run (``python -m``)."""

    device: str
    host: str = "engine.host"
    rnic: str = "engine.link.rnic"
    smartnic: str = "engine.smartnic"


class Launcher:
    """One stack of processes; a context manager that leaves nothing running.

    ``run`` returns the exit status: 0 after a clean drain, 1 when the device was lost or a
    process had to be killed. Raises UserError when the stack cannot start.
    """

    def __init__(self, config: ServeConfig, modules: Modules | None = None) -> None:
        self._modules = modules or Modules(device=DEVICE_MODULES[config.device.device])
        self._listener = listen(config.smartnic.host, config.smartnic.port)
        port: int = self._listener.getsockname()[1]
        self._link = _set_up_link(config)
        self._runtime = RuntimeDir()
        self._set_config(
            self._link.config.replace(
                smartnic=config.smartnic.replace(port=port), runtime_dir=str(self._runtime.path)
            )
        )
        if self._config.link == "vm":
            self._listener.close()  # QEMU listens there for the SmartNIC's machine
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, Child] = {}
        self._wakeup, self._waker = socket.socketpair()
        self._stop_signals = 0
        self._last_stop_s = -SAME_STOP_S
        self._num_restarts = 0
        self._restart_at: dict[str, float] = {}
        self._is_clean = True
        self._offer: Offer | None = None
        self._handshakes: HandshakeServer | None = None
        self._is_serving = False
        self._closed = False

    def _set_config(self, config: ServeConfig) -> None:
        """What children that start from now on are started with."""
        self._config = config
        self._config_path = self._runtime.path / "config.json"
        self._config_path.write_text(config.to_json())

    def run(self) -> int:
        """Start, serve until told to stop, drain."""
        self._catch_signals()
        _say(f"link {self._config.link}: {self._config.link_reason}")
        if self._modules.device:
            self._start("device")
        if self._config.is_rdma:
            self._start("rnic")
            self._wait_ready(self._children["rnic"])
            self._locate_window()
        for name in ("host", "smartnic"):
            self._start(name)
            self._wait_ready(self._children[name])
            if name == "host" and self._config.handshake_socket.exists():
                self._offer = fetch_offer(self._config.handshake_socket)
        self._announce()
        self._is_serving = True
        while not self._stop_signals:
            self._turn(self._time_to_restart())
            self._restart_when_due()
        self._drain()
        return 0 if self._is_clean else 1

    def _locate_window(self) -> None:
        """The RNIC's machine says where in the window's file its memory lies."""
        offset, num_bytes = self._fact("window_offset", 0), self._fact("window_bytes", 0)
        assert isinstance(offset, int)
        assert isinstance(num_bytes, int)
        window = self._config.window.replace(offset=offset, num_bytes=num_bytes)
        self._set_config(self._config.replace(window=window))

    # ---- start

    def _catch_signals(self) -> None:
        for end in (self._wakeup, self._waker):
            end.setblocking(False)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_stop_signal)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        # One request to stop may come twice, to the process and to its group (timeout, systemd).
        now = time.monotonic()
        if now - self._last_stop_s > SAME_STOP_S:
            self._stop_signals += 1
        self._last_stop_s = now

    def _start(self, name: str) -> None:
        arguments, inherited = self._arguments(name)
        module = self._module(name)
        child = Child(
            name,
            [sys.executable, "-m", module, *arguments],
            log_path=None if self._config.debug else self._runtime.path / f"{name}.log",
            environment=os.environ,
            inherit=[sock.fileno() for sock in inherited],
        )
        if name == "device":
            inherited[0].close()  # the device's alone: when it dies, connecting fails at once
        self._children[name] = child
        self._selector.register(child.report_fd, selectors.EVENT_READ, child)
        self._selector.register(child.death_fd, selectors.EVENT_READ, child)

    def _module(self, name: str) -> str:
        if self._config.link == "vm" and name in RESTARTED:
            return MACHINE_MODULE
        module: str = getattr(self._modules, name)
        return module

    def _arguments(self, name: str) -> tuple[list[str], list[socket.socket]]:
        """Command-line arguments of a child, and the listening sockets that it inherits."""
        if self._config.link == "vm" and name in RESTARTED:
            return [name, "--config", str(self._config_path)], []
        if name == "rnic":
            words = ["--window", self._config.window.file, "--verbs", self._config.verbs.to_json()]
            return [*words, "--port", str(self._config.rnic.port)], []
        if name == "host":
            return ["--config", str(self._config_path)], []
        if name == "smartnic":
            fd = str(self._listener.fileno())
            return ["--config", str(self._config_path), "--listen-fd", fd], [self._listener]
        # Listening already, so that the host may connect while the device still starts.
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(self._config.device_socket))
        listener.listen()
        device = self._config.device
        arguments = ["--socket", str(self._config.device_socket)]
        arguments += ["--listen-fd", str(listener.fileno())]
        arguments += ["--threads", str(device.num_threads)]
        memory_bytes = device.memory_mib << 20 or available_memory_bytes()
        arguments += ["--memory-bytes", str(memory_bytes)]
        return arguments, [listener]

    def _wait_ready(self, child: Child) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S[child.name]
        while child.ready is None:
            self._turn(deadline - time.monotonic())
            if self._stop_signals:
                raise Interrupted
            for started in self._children.values():
                if not started.is_running or started.failure is not None:
                    raise LaunchError(self._reason(started))
            if time.monotonic() > deadline:
                limit_s = READY_TIMEOUT_S[child.name]
                raise LaunchError(f"the {child.name} process was not ready within {limit_s:.0f} s")

    def _reason(self, child: Child) -> str:
        device = self._children.get("device", child)
        if child is not device and device.wait(1.0):
            child = device  # what it took with it is not the cause
        if child.wait(1.0) and child.failure is None:
            return f"the {child.name} process ended while starting ({child.last_words()})"
        return child.last_words()

    def _announce(self) -> None:
        host, port = self._config.smartnic.host, self._config.smartnic.port
        line = ReadyLine(
            url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
            model=str(self._fact("model_id", self._config.model.model)),
            device=self._config.device.device,
            link=self._config.link,
            window=str(self._fact("window")),
            path=self._config.path,
            launcher_pid=os.getpid(),
            device_pid=self._children.get("device", self._children["host"]).pid,
            host_pid=self._children["host"].pid,
            smartnic_pid=self._children["smartnic"].pid,
            rnic_pid=self._children["rnic"].pid if "rnic" in self._children else 0,
        )
        print(line.to_line(), flush=True)

    def _fact(self, key: str, default: object = "unknown") -> object:
        for child in self._children.values():
            if child.ready is not None and key in child.ready.facts:
                return child.ready.facts[key]
        return default

    # ---- watch

    def _turn(self, timeout_s: float | None) -> None:
        """Wait for one round of reports, deaths and signals, and act on them."""
        dead = []
        for key, _ in self._selector.select(None if timeout_s is None else max(0.0, timeout_s)):
            child: Child | None = key.data
            if child is None:
                self._wakeup.recv(4096)
            elif key.fd == child.death_fd:
                dead.append(child)
            else:
                self._show_reports(child)
        for child in dead:
            self._forget(child)
            if self._children.get(child.name) is child and not self._stop_signals:
                self._on_death(child)

    def _show_reports(self, child: Child) -> None:
        for entry in child.read_reports():
            if entry.event != "error":
                _say(f"{child.name}: {entry.message}")
        if child.is_silent:
            self._selector.unregister(child.report_fd)

    def _forget(self, child: Child) -> None:
        for descriptor in (child.report_fd, child.death_fd):
            try:
                self._selector.unregister(descriptor)
            except KeyError:
                pass

    def _on_death(self, child: Child) -> None:
        if not self._is_serving:
            return  # _wait_ready says why
        words = child.last_words()
        if child.name == "device":
            self._is_clean = False
            _say(f"device process ended ({words}); requests get 503; start anew")
        elif child.name == "host":
            if "device" not in self._children:
                self._is_clean = False
                _say(f"host process ended ({words}), and the GPU's loop with it; start anew")
            elif child.process.returncode == 0:
                self._is_clean = False
                _say("host process was told to stop, and stopped the device; requests get 503")
            elif self._children["device"].is_running:
                _say(f"host process ended ({words}); serving goes on")
        else:
            self._plan_restart(child, words)

    def _plan_restart(self, child: Child, words: str) -> None:
        if time.monotonic() - child.started_at > STABLE_AFTER_S:
            self._num_restarts = 0
        delay_s = RESTART_DELAYS_S[min(self._num_restarts, len(RESTART_DELAYS_S) - 1)]
        self._num_restarts += 1
        self._restart_at[child.name] = time.monotonic() + delay_s
        child.close()
        _say(f"{child.name} process ended ({words}); starting it again in {delay_s:g} s")

    def _time_to_restart(self) -> float | None:
        return min(self._restart_at.values()) - time.monotonic() if self._restart_at else None

    def _answer_handshakes(self) -> None:
        """In the host's place from now on: it may be frozen or gone when a SmartNIC comes back."""
        if self._handshakes is None and self._offer is not None:
            self._config.handshake_socket.unlink(missing_ok=True)
            self._handshakes = HandshakeServer(self._config.handshake_socket, self._offer)

    def _restart_when_due(self) -> None:
        for name in [one for one, at in self._restart_at.items() if time.monotonic() >= at]:
            del self._restart_at[name]
            if name == "smartnic":
                self._answer_handshakes()
            self._start(name)
            _say(f"{name} process started again, pid {self._children[name].pid}")

    # ---- stop

    def _drain(self) -> None:
        """SmartNIC first, so that nothing new comes; then the host, which ends the steps."""
        self._restart_at.clear()
        drain_timeout_s = self._config.smartnic.drain_timeout_s
        if self._children["smartnic"].is_running:
            _say("draining")
        self._stop(self._children["smartnic"], drain_timeout_s + STOP_TIMEOUT_S)
        for name in ("host", "device", "rnic"):
            if name in self._children:
                self._stop(self._children[name], STOP_TIMEOUT_S)
        _say("stopped" if self._is_clean else "stopped, but not cleanly")

    def _stop(self, child: Child, timeout_s: float) -> bool:
        """End a child, by force after the timeout or a further Ctrl-C; whether it ended well."""
        if child.is_running:
            child.send(signal.SIGTERM)
        else:
            return True
        deadline = time.monotonic() + timeout_s
        signals_before = self._stop_signals
        while not child.wait(0.05):
            if time.monotonic() > deadline or self._stop_signals > signals_before:
                _say(f"{child.name} process did not stop in time and was killed")
                child.close()
        if child.process.returncode == 0:
            return True
        self._is_clean = False
        if child.process.returncode != -signal.SIGKILL:
            _say(f"{child.name} process ended badly ({child.last_words()})")
        return False

    def close(self) -> None:
        """End every child and remove the runtime folder; idempotent."""
        if self._closed:
            return
        self._closed = True
        for child in reversed(self._children.values()):
            child.close()
        if self._handshakes is not None:
            self._handshakes.close()
        if self._offer is not None and self._offer.window_fd >= 0:
            os.close(self._offer.window_fd)
        signal.set_wakeup_fd(-1)
        self._selector.close()
        self._wakeup.close()
        self._waker.close()
        self._listener.close()
        self._link.close()
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class LinkSetup(Protocol):
    """What `emulation.link_setup` has done for the link."""

    config: ServeConfig

    def close(self) -> None:
        """Undo it."""


def _set_up_link(config: ServeConfig) -> LinkSetup:
    setup: LinkSetup = importlib.import_module(LINK_SETUP).LinkSetup(config, os.getpid())
    return setup


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket, which the SmartNIC inherits; a restarted one keeps the port.

    Raises LaunchError when the port is taken or the address is not this machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise LaunchError(f"cannot listen on host {host!r}: {error.strerror or error}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LaunchError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port"
        ) from None
    return listener


def _say(message: str) -> None:
    print(f"blinkbed: {message}", file=sys.stderr, flush=True)
