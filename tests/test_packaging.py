"""What is installed, and what ``make`` says when something is missing."""

from __future__ import annotations

import os
import subprocess
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import engine

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("engine", "emulation", "loadtests")


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def make(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", *words]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True
    )


def test_the_command_is_installed() -> None:
    (script,) = entry_points(group="console_scripts", name="blinkbed")
    assert script.value == "engine.cli:main"


def test_every_folder_with_modules_is_a_package() -> None:
    modules = [path for top in SHIPPED for path in (ROOT / top).rglob("*.py")]
    assert modules
    assert [path for path in modules if not (path.parent / "__init__.py").exists()] == []


def test_every_source_that_is_no_module_is_package_data() -> None:
    patterns = project()["tool"]["setuptools"]["package-data"]["*"]
    left_out = []
    for top in SHIPPED:
        for path in (ROOT / top).rglob("*"):
            if not path.is_file() or path.suffix in (".py", ".pyc") or path.name == "README.md":
                continue
            package = path.parent
            while not (package / "__init__.py").exists():
                package = package.parent
            if not any(path.relative_to(package).match(pattern) for pattern in patterns):
                left_out.append(path)
    assert left_out == []


def test_torch_is_pinned_and_the_version_is_the_package_s() -> None:
    table = project()
    assert any(line.startswith("torch==") for line in table["project"]["dependencies"])
    assert table["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "engine.__version__"
    assert engine.__version__.count(".") == 2


def test_a_missing_python_is_one_sentence() -> None:
    done = make("needs", "PYTHON=/no/such/python")
    assert done.returncode != 0
    assert "Python >= 3.11 is needed" in done.stderr.splitlines()[0]


def test_an_old_python_is_one_sentence(tmp_path: Path) -> None:
    old = tmp_path / "python3"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    old.chmod(0o755)
    done = make("needs", f"PYTHON={old}")
    assert done.returncode != 0
    assert "Python 3.9.2" in done.stderr.splitlines()[0]


def test_a_missing_compiler_is_one_sentence() -> None:
    done = make("needs", "CXX=/no/such/compiler")
    assert done.returncode != 0
    assert "C++17 compiler is needed" in done.stderr.splitlines()[0]
    assert "/no/such/compiler" in done.stderr.splitlines()[0]


def test_make_wraps_commands_that_a_person_can_type() -> None:
    for target, command in (
        ("demo", "blinkbed demo"),
        ("test", "python -m pytest"),
        ("lint", "ruff check ."),
        ("types", "mypy"),
        ("bench", "python -m loadtests.bench"),
        ("load", "python -m loadtests.run"),
    ):
        assert command in make("--dry-run", target).stdout


def test_the_licence_is_apache_2() -> None:
    assert project()["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
