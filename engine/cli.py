"""The ``blinkbed`` command. Flags, defaults and help come from the configuration's fields."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import engine
from engine.config import Section, ServeConfig, field_types
from engine.progress import sentence_of

EXIT_USER_ERROR = 1
EXIT_INTERRUPTED = 130
STACK_COMMANDS = {
    "serve": "serve a model over HTTP until SIGTERM or Ctrl-C",
    "demo": "serve, stream some answers, and freeze the host in the middle",
}
OTHER_COMMANDS = {
    "doctor": ("emulation.doctor", "say what this machine can do, by trying it"),
    "fault": ("compose.fault", "break a running stack of containers in one way, or heal it"),
    "bench": ("loadtests.bench_command", "measure, with the hardware beside the figures"),
    "simulate": ("engine.simulate.command", "run the scheduler over a trace in virtual time"),
    "calibrate": ("engine.calibrate", "measure a GPU's steps into a profile"),
    "compare": ("loadtests.compare.command", "measure the control paths over a grid"),
    "report": ("loadtests.report.command", "make the page of what was compared"),
}
"""Name -> module with `add_arguments(parser)` and `run(arguments) -> int`; help. By name, since the
engine does not depend on them.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """A configuration field as a command-line flag; ``keys`` is the way to it in the mapping."""

    keys: tuple[str, ...]
    kind: type
    default: Any
    help_text: str
    name: str

    def add_to(self, parser: argparse._ArgumentGroup) -> None:
        """Declare the flag; one not given stays out of the parsed result."""
        common: dict[str, Any] = {"dest": ".".join(self.keys), "default": argparse.SUPPRESS}
        if self.kind is bool:
            action = "store_false" if self.default else "store_true"
            name = f"--no-{self.name}" if self.default else f"--{self.name}"
            help_text = f"do not {self.help_text}" if self.default else self.help_text
            parser.add_argument(name, action=action, help=help_text, **common)
            return
        metavar = {int: "N", float: "SECONDS"}.get(self.kind, self.name.upper())
        help_text = f"{self.help_text} (default: {self.default})".replace("%", "%%")
        parser.add_argument(
            f"--{self.name}", type=self.kind, metavar=metavar, help=help_text, **common
        )


def flags_of(section: type[Section], keys: tuple[str, ...] = ()) -> Iterator[Flag]:
    """All flags of a section and of the sections in it."""
    types = field_types(section)
    for entry in dataclasses.fields(section):  # type: ignore[arg-type]
        kind = types[entry.name]
        here = (*keys, entry.name)
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from flags_of(kind, here)
        elif not entry.metadata.get("hidden", False):
            name = entry.metadata.get("flag") or entry.name.replace("_", "-")
            yield Flag(here, kind, entry.default, entry.metadata["help"], name)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of ``blinkbed serve``, grouped by component."""
    groups: dict[tuple[str, ...], argparse._ArgumentGroup] = {}
    for flag in flags_of(ServeConfig):
        component = flag.keys[:-1]
        if component not in groups:
            groups[component] = parser.add_argument_group(component[0] if component else "stack")
        flag.add_to(groups[component])


def config_from(arguments: argparse.Namespace) -> ServeConfig:
    """The configuration that the given flags make; raises ConfigError."""
    values: dict[str, Any] = {}
    for flag in flags_of(ServeConfig):
        key = ".".join(flag.keys)
        if not hasattr(arguments, key):
            continue
        *sections, name = flag.keys
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = getattr(arguments, key)
    return ServeConfig.from_mapping(values)


def words_of(config: ServeConfig) -> list[str]:
    """The arguments of ``blinkbed serve`` that make this configuration."""
    words = []
    for flag in flags_of(ServeConfig):
        value: Any = config
        for key in flag.keys:
            value = getattr(value, key)
        if value == flag.default:
            continue
        if flag.kind is bool:
            words.append(f"--no-{flag.name}" if flag.default else f"--{flag.name}")
        else:
            words.append(f"--{flag.name}={value}")
    return words


def make_parser(command: str = "") -> argparse.ArgumentParser:
    """The command line of all commands; the flags of other than stack commands only for `command`,
    whose module is imported for it.
    """
    parser = argparse.ArgumentParser(
        prog="blinkbed", description="A test bed for CPU-free LLM inference.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"blinkbed {engine.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, help_text in STACK_COMMANDS.items():
        entry = commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        add_serve_flags(entry)
    for name, (module, help_text) in OTHER_COMMANDS.items():
        entry = commands.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        if name == command:
            importlib.import_module(module).add_arguments(entry)
    return parser


def serve(config: ServeConfig) -> int:
    """Run a stack until it is told to stop."""
    from engine.launcher import Launcher

    with Launcher(config) as launcher:
        return launcher.run()


def demo(config: ServeConfig) -> int:
    """Show that tokens keep coming while the host is frozen."""
    from engine.demo.story import run

    return run(config)


def main(words: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit status."""
    words = sys.argv[1:] if words is None else words
    debug = False
    try:
        arguments = make_parser(words[0] if words else "").parse_args(words)
        debug = getattr(arguments, "debug", False)
        if arguments.command in OTHER_COMMANDS:
            module = importlib.import_module(OTHER_COMMANDS[arguments.command][0])
            return int(module.run(arguments))
        command = {"serve": serve, "demo": demo}[arguments.command]
        return command(config_from(arguments))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Nobody reads our output any more; keep the interpreter from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"blinkbed: {sentence_of(error)}", file=sys.stderr)
    return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
