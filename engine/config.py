"""Configuration: one frozen dataclass per component, and the environment.

Every default, limit and help text of the program is here; the command line is derived from the
fields' metadata. A configuration travels to the child processes as JSON.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.link.verbs_config import HANDSHAKE_PORT, VerbsConfig
from engine.section import ConfigError, Section, field_types, option

MAX_PORTS = 256
MAX_SLOTS_PER_PORT = 32768  # a doorbell word has 16 bits for the slot
MAX_SOCKET_PATH_BYTES = 107  # sun_path of sockaddr_un(7), less its terminating zero
DEVICES = ("sim", "cuda")
LINKS = ("auto", "rxe", "vm", "shm")
VERBS_LINKS = ("rxe", "vm")
PATHS = ("persistent", "sync", "async")
WINDOWS = MAPPED, STAGED = "mapped", "staged"


@dataclass(frozen=True, slots=True)
class RingConfig(Section):
    """Geometry of the window: the only memory that the SmartNIC can reach."""

    num_slots: int = option(
        64,
        "request slots of each port, a power of two",
        flag="ring-slots",
    )
    num_ports: int = option(1, "SmartNIC workers, each with its own part of the window")
    token_ring_entries: int = option(8192, "entries of each port's token ring, a power of two")

    def __post_init__(self) -> None:
        self._require_power_of_two("num_slots", 2, MAX_SLOTS_PER_PORT)
        self._require_range("num_ports", 1, MAX_PORTS)
        self._require_power_of_two("token_ring_entries", 16, 1 << 24)
        self._require(
            self.token_ring_entries >= self.num_slots,
            "token_ring_entries",
            f"must be at least num_slots={self.num_slots}",
        )

    @property
    def num_sequences(self) -> int:
        """Slots of all ports together; a request's id on the device is its global slot number."""
        return self.num_ports * self.num_slots


@dataclass(frozen=True, slots=True)
class SchedulerConfig(Section):
    """Limits within which the device schedules."""

    num_pages: int = option(2048, "pages of the KV cache")
    page_size: int = option(16, "tokens in a KV page, a power of two")
    max_running: int = option(16, "requests that take part in a step at most")
    max_step_tokens: int = option(256, "token budget of a step: decode first, then prefill chunks")
    max_context: int = option(2048, "tokens of a request at most, prompt and output together")
    chunked_prefill: bool = option(True, "divide long prompts over several steps")
    debug: bool = option(
        False,
        "prove after every step that free and used KV pages add up to all pages",
        flag="debug-scheduler",
    )

    def __post_init__(self) -> None:
        self._require_power_of_two("page_size", 1, 256)
        self._require_range("num_pages", 1, 1 << 24)
        self._require_range("max_running", 1, 1024)
        self._require_range("max_step_tokens", 1, 1 << 16)
        self._require_range("max_context", 2, 1 << 20)
        self._require(
            self.max_step_tokens >= self.max_running,
            "max_step_tokens",
            f"must be at least max_running={self.max_running}, one token for each running request",
        )
        self._require(
            self.chunked_prefill or self.max_step_tokens >= self.max_context,
            "max_step_tokens",
            f"must be at least max_context={self.max_context} without chunked prefill "
            "(--max-step-tokens)",
        )

    @property
    def max_pages_per_seq(self) -> int:
        """Entries of a sequence's block table."""
        return -(-self.max_context // self.page_size)


@dataclass(frozen=True, slots=True)
class ModelConfig(Section):
    """Which model is served."""

    model: str = option(
        "smollm2",
        "smollm2, scripted, scripted:FILE, paced:PROFILE (scripted, each step as long as on the "
        "GPU of a profile such as 8b-h200), random:SHAPE (random weights, for measuring), a GGUF "
        "file, or a Hugging Face folder with safetensors",
    )

    def __post_init__(self) -> None:
        self._require(bool(self.model.strip()), "model", "must name a model")


@dataclass(frozen=True, slots=True)
class SmartnicConfig(Section):
    """The HTTP front end."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "TCP port to listen on; 0 takes a free one")
    heartbeat_timeout_s: float = option(3.0, "age of the device's heartbeat at which it is lost")
    drain_timeout_s: float = option(30.0, "time that running requests have to end at SIGTERM")

    def __post_init__(self) -> None:
        self._require(bool(self.host), "host", "must be an address or a host name")
        self._require_range("port", 0, 65535)
        self._require_range("heartbeat_timeout_s", 0.1, 3600)
        self._require_range("drain_timeout_s", 0, 3600)


@dataclass(frozen=True, slots=True)
class DeviceConfig(Section):
    """The GPU, or what stands in for it."""

    device: str = option(
        "sim", "sim: the simulated GPU, a process of its own; cuda: a real one", choices=DEVICES
    )
    threads: int = option(0, "CPU threads of the simulated GPU; 0 takes all cores")
    memory_mib: int = option(0, "memory of the simulated GPU in MiB; 0 takes what is available")

    def __post_init__(self) -> None:
        self._require_choice("device", DEVICES)
        self._require_range("threads", 0, 4096)
        self._require_range("memory_mib", 0, 1 << 24)

    @property
    def num_threads(self) -> int:
        """CPU threads of the simulated GPU: as given, or one for each core we may run on."""
        return self.threads or len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class WindowConfig(Section):
    """Where the host puts the window: in memory of its own, or in a file that an RNIC maps."""

    home: str = option(
        MAPPED,
        "where the window of a real GPU lies: mapped (host memory that the GPU polls) or staged "
        "(GPU memory, into which the SmartNIC's process copies)",
        flag="window",
        choices=WINDOWS,
    )
    file: str = option("", "file that the RNIC maps as the window", flag="window-file")
    offset: int = option(0, "first byte of the window in that file", flag="window-offset")
    num_bytes: int = option(0, "bytes of the window there; 0: to its end", flag="window-bytes")

    def __post_init__(self) -> None:
        self._require_choice("home", WINDOWS)
        self._require_range("offset", 0, 1 << 48)
        self._require(self.offset % 4096 == 0, "offset", "must be a multiple of 4096")
        self._require_range("num_bytes", 0, 1 << 48)


@dataclass(frozen=True, slots=True)
class RnicConfig(Section):
    """Where the SmartNIC finds the RNIC of the GPU's side, on the links that are RDMA."""

    address: str = option("", "address of the RNIC's machine", flag="rnic")
    port: int = option(HANDSHAKE_PORT, "its TCP port for handshakes", flag="rnic-port")

    def __post_init__(self) -> None:
        self._require_range("port", 1, 65535)


@dataclass(frozen=True, slots=True)
class ServeConfig(Section):
    """Everything that one stack of processes is started with."""

    model: ModelConfig = field(default_factory=ModelConfig)
    ring: RingConfig = field(default_factory=RingConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    smartnic: SmartnicConfig = field(default_factory=SmartnicConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    rnic: RnicConfig = field(default_factory=RnicConfig)
    verbs: VerbsConfig = field(default_factory=VerbsConfig)
    link: str = option(
        "shm",
        "how the SmartNIC reaches the window: shm (shared memory), vm (RDMA between two emulated "
        "machines), rxe (RDMA of this host's kernel), auto (the best of these that works here)",
        choices=LINKS,
    )
    link_reason: str = option("", "why this link", hidden=True)
    path: str = option(
        "persistent",
        "who drives the steps: persistent (the device itself), sync (the host, taking turns with "
        "the device), async (the host, one step ahead of the device)",
        choices=PATHS,
    )
    timeline: str = option(
        "", "file for the timeline of the last steps, written when the server stops"
    )
    runtime_dir: str = option("", "folder of sockets, made by the launcher", hidden=True)
    debug: bool = option(False, "show full tracebacks")

    def __post_init__(self) -> None:
        self._require_choice("link", LINKS)
        self._require_choice("path", PATHS)
        self._require_staging()
        longest = os.fsencode(self.runtime_path / "handshake.sock")
        self._require(
            len(longest) <= MAX_SOCKET_PATH_BYTES,
            "runtime_dir",
            f"too long for a Unix socket, whose path has {MAX_SOCKET_PATH_BYTES} bytes at most",
        )

    def _require_staging(self) -> None:
        if self.window.home != STAGED:
            return
        for key, value, needed in (
            ("device", self.device.device, "cuda"),
            ("path", self.path, "persistent"),
            ("link", self.link, "shm"),
        ):
            if value != needed:
                raise ConfigError(f"--window staged needs --{key} {needed}, not {value}")

    @property
    def is_rdma(self) -> bool:
        """Whether the SmartNIC reaches the window by RDMA."""
        return self.link in VERBS_LINKS

    @property
    def runtime_path(self) -> Path:
        """The runtime folder, private to one stack."""
        return Path(self.runtime_dir)

    @property
    def device_socket(self) -> Path:
        """Where the simulated device listens for its host."""
        return self.runtime_path / "device.sock"

    @property
    def handshake_socket(self) -> Path:
        """Where the SmartNIC asks for the window's geometry, epoch and access."""
        return self.runtime_path / "handshake.sock"


@dataclass(frozen=True, slots=True)
class Environment:
    """All environment variables that the program reads."""

    cache_dir: Path
    """BLINKBED_CACHE, else XDG_CACHE_HOME/blinkbed: models and compiled libraries."""
    compiler: tuple[str, ...]
    """CXX, else c++: command (and leading arguments) of the C++17 compiler."""

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Parse the process environment (or the given variables)."""
        given = os.environ if variables is None else variables
        home = Path(given.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cache_dir = Path(given.get("BLINKBED_CACHE") or home / "blinkbed")
        compiler = tuple(shlex.split(given.get("CXX") or "c++"))
        return cls(cache_dir=cache_dir.expanduser().absolute(), compiler=compiler or ("c++",))


__all__ = [
    "ConfigError", "DeviceConfig", "Environment", "ModelConfig", "RingConfig", "RnicConfig",
    "SchedulerConfig", "Section", "ServeConfig", "SmartnicConfig", "VerbsConfig", "WindowConfig",
    "field_types", "option",
]  # fmt: skip
