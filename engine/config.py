"""Configuration: one frozen dataclass per component, and the environment.

Every default, limit and help text of the program is here; the command line is derived from the
fields' metadata. A configuration travels to the child processes as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from engine.errors import UserError

MAX_PORTS = 256
MAX_SLOTS_PER_PORT = 32768  # a doorbell word has 16 bits for the slot
MAX_SOCKET_PATH_BYTES = 107  # sun_path of sockaddr_un(7), less its terminating zero
DEVICES = ("sim",)
LINKS = ("shm",)
PATHS = ("persistent",)


class ConfigError(UserError, ValueError):
    """A configuration value that cannot be used; the message names the key and the value."""


def option(
    default: Any,
    help_text: str,
    *,
    flag: str | None = None,
    choices: tuple[str, ...] | None = None,
    hidden: bool = False,
) -> Any:
    """A dataclass field that is also a command-line flag (``--field-name`` unless named)."""
    metadata = {"help": help_text, "flag": flag, "choices": choices, "hidden": hidden}
    return field(default=default, metadata=metadata)


def field_types(section: type[Section]) -> dict[str, Any]:
    """Field name -> type of a section, annotations resolved."""
    return typing.get_type_hints(section)


class Section:
    """Base of all configuration dataclasses: strict construction from mappings, and JSON."""

    __slots__ = ()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], prefix: str = "") -> Self:
        """Build from a (nested) mapping; unknown keys and wrong types raise ConfigError."""
        types = field_types(cls)
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            name = prefix + key
            if key not in types:
                known = ", ".join(sorted(types))
                raise ConfigError(f"unknown configuration key {name}={value!r}; known: {known}")
            kind = types[key]
            if isinstance(kind, type) and issubclass(kind, Section):
                if not isinstance(value, Mapping):
                    raise ConfigError(f"{name}={value!r} must be a mapping")
                arguments[key] = kind.from_mapping(value, prefix=f"{name}.")
            else:
                arguments[key] = _checked(name, value, kind)
        return cls(**arguments)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of ``to_json``."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"configuration is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError("configuration must be a JSON object")
        return cls.from_mapping(values)

    def to_json(self) -> str:
        """One line of JSON with every field."""
        return json.dumps(dataclasses.asdict(self))  # type: ignore[call-overload]

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def _require(self, condition: bool, key: str, rule: str) -> None:
        if not condition:
            raise ConfigError(f"{key}={getattr(self, key)!r}: {rule}")

    def _require_range(self, key: str, low: float, high: float) -> None:
        value = getattr(self, key)
        self._require(low <= value <= high, key, f"must be between {low} and {high}")

    def _require_power_of_two(self, key: str, low: int, high: int) -> None:
        value: int = getattr(self, key)
        power = value > 0 and value & (value - 1) == 0
        self._require(
            power and low <= value <= high, key, f"must be a power of two from {low} to {high}"
        )

    def _require_choice(self, key: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, key)
        self._require(value in choices, key, f"not available; there is: {', '.join(choices)}")


def _checked(name: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ConfigError(f"{name}={value!r} must be of type {kind.__name__}")
    return value


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
        "smollm2, scripted, scripted:FILE, a GGUF file, or a Hugging Face folder with safetensors",
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

    device: str = option("sim", "sim: the simulated GPU, a process of its own", choices=DEVICES)
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
class ServeConfig(Section):
    """Everything that one stack of processes is started with."""

    model: ModelConfig = field(default_factory=ModelConfig)
    ring: RingConfig = field(default_factory=RingConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    smartnic: SmartnicConfig = field(default_factory=SmartnicConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    link: str = option("shm", "how the SmartNIC reaches the window", choices=LINKS)
    path: str = option("persistent", "who drives the steps", choices=PATHS)
    runtime_dir: str = option("", "folder of sockets, made by the launcher", hidden=True)
    debug: bool = option(False, "show full tracebacks")

    def __post_init__(self) -> None:
        self._require_choice("link", LINKS)
        self._require_choice("path", PATHS)
        longest = os.fsencode(self.runtime_path / "handshake.sock")
        self._require(
            len(longest) <= MAX_SOCKET_PATH_BYTES,
            "runtime_dir",
            f"too long for a Unix socket, whose path has {MAX_SOCKET_PATH_BYTES} bytes at most",
        )

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
