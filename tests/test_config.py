"""Configuration: strict, with errors that name the key and the value; flags derived from it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from engine.cli import config_from, flags_of, make_parser, words_of
from engine.config import (
    ConfigError,
    Environment,
    RingConfig,
    SchedulerConfig,
    ServeConfig,
    SmartnicConfig,
)


def parse(*words: str) -> ServeConfig:
    return config_from(make_parser().parse_args(["serve", *words]))


def test_json_gives_the_same_configuration_back() -> None:
    config = ServeConfig(
        ring=RingConfig(num_slots=8), scheduler=SchedulerConfig(chunked_prefill=True, num_pages=7)
    )
    assert ServeConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"colour": 1}, ["colour=1"]),
        ({"ring": {"slots": 4}}, ["ring.slots=4"]),
        ({"ring": 4}, ["ring=4"]),
        ({"ring": {"num_slots": "4"}}, ["ring.num_slots='4'", "int"]),
        ({"ring": {"num_slots": True}}, ["ring.num_slots=True", "int"]),
        ({"ring": {"num_slots": 63}}, ["num_slots=63", "power of two"]),
        ({"ring": {"num_slots": 64, "token_ring_entries": 32}}, ["token_ring_entries=32", "64"]),
        ({"scheduler": {"max_running": 300}}, ["max_step_tokens=256", "max_running=300"]),
        ({"scheduler": {"chunked_prefill": False}}, ["max_step_tokens=256", "max_context=2048"]),
        ({"scheduler": {"num_pages": 0}}, ["num_pages=0"]),
        ({"smartnic": {"port": 70000}}, ["port=70000"]),
        ({"device": {"device": "tpu"}}, ["device='tpu'", "sim"]),
        ({"link": "tcp"}, ["link='tcp'", "shm"]),
        ({"path": "magic"}, ["path='magic'", "persistent"]),
        ({"runtime_dir": "/tmp/" + "x" * 120}, ["runtime_dir", "107"]),
    ],
)
def test_an_unusable_value_is_named(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeConfig.from_mapping(values)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_text_that_is_not_a_json_object_is_refused() -> None:
    for text in ("", "[]", "{"):
        with pytest.raises(ConfigError):
            ServeConfig.from_json(text)


def test_configuration_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        ServeConfig().link = "rxe"  # type: ignore[misc]


def test_flags_without_arguments_give_the_defaults() -> None:
    assert parse() == ServeConfig()


def test_every_flag_reaches_its_field_and_back() -> None:
    config = parse(
        *("--model", "scripted", "--port", "0", "--num-pages", "9", "--page-size", "8"),
        *("--max-running", "3", "--ring-slots", "4", "--max-context", "99", "--host", "::1"),
        *("--max-step-tokens", "100", "--token-ring-entries", "16", "--no-chunked-prefill"),
        *("--debug", "--debug-scheduler", "--drain-timeout-s", "1.5"),
    )
    assert config.model.model == "scripted"
    assert config.ring == RingConfig(num_slots=4, token_ring_entries=16)
    assert config.scheduler == SchedulerConfig(
        num_pages=9,
        page_size=8,
        max_running=3,
        max_step_tokens=100,
        max_context=99,
        chunked_prefill=False,
        debug=True,
    )
    assert config.smartnic == SmartnicConfig(host="::1", port=0, drain_timeout_s=1.5)
    assert config.debug
    assert parse(*words_of(config)) == config


def test_flag_names_are_unique_and_explained() -> None:
    flags = list(flags_of(ServeConfig))
    assert len({flag.name for flag in flags}) == len(flags)
    assert all(flag.help_text for flag in flags)


def test_environment_is_read_in_one_place() -> None:
    given = {"BLINKBED_CACHE": "/a/b", "CXX": "ccache g++"}
    assert Environment.read(given) == Environment(Path("/a/b"), ("ccache", "g++"))
    assert Environment.read({"XDG_CACHE_HOME": "/c"}).cache_dir == Path("/c/blinkbed")
