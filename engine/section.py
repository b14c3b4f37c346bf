"""What all configuration dataclasses share: strict construction, checks, JSON, and the metadata
that command-line flags are made of.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import field
from typing import Any, Self

from engine.errors import UserError


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
