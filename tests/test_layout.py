"""One source for every layout: Python, the generated C header, and the compilers agree."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from engine import native, protocol, state
from engine.layout import HEADER_PATH, Struct, generate
from engine.protocol import LINE_BYTES, Geometry
from engine.ring_library import CSRC

GEOMETRIES = [
    Geometry(num_slots=2, token_ring_entries=16, max_context=2, vocab_size=2),
    Geometry(num_slots=8, token_ring_entries=16, max_context=33, vocab_size=300),
    Geometry(num_slots=64, token_ring_entries=8192, max_context=2048, vocab_size=49152),
]


def test_the_generated_header_is_current() -> None:
    assert HEADER_PATH.read_text() == generate(), "run: python -m engine.layout"


def test_the_host_compiler_agrees_on_sizes_and_offsets(tmp_path: Path) -> None:
    """The header's own static_asserts; one deliberately wrong must be refused."""
    right, wrong = tmp_path / "right.cpp", tmp_path / "wrong.cpp"
    text = HEADER_PATH.read_text().replace("#pragma once", "")
    right.write_text(text)
    native.build_library([right], name="layout")
    wrong.write_text(text.replace("sizeof(Record) == 128", "sizeof(Record) == 64"))
    with pytest.raises(native.CompileError, match="Record"):
        native.build_library([wrong], name="layout")


def test_nvcc_compiles_the_scheduler(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not in PATH")
    flags = ["-std=c++17", "-arch=sm_90", "-rdc=true", "-Werror", "all-warnings", "-c"]
    flags += ["-Xcicc", "-O0", "-Xptxas", "-O0"]  # ten times as fast; nothing is run
    done = subprocess.run(
        [nvcc, *flags, str(CSRC / "scheduler_kernel.cu"), "-o", str(tmp_path / "kernel.o")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_struct_refuses_padding_and_a_wrong_size() -> None:
    with pytest.raises(ValueError, match="not naturally aligned"):
        Struct("Bad", 12, ("small", "u4"), ("wide", "u8"))
    with pytest.raises(ValueError, match="has 8 bytes, declared are 16"):
        Struct("Bad", 16, ("wide", "u8"))


def test_the_layout_hash_changes_with_every_field(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = {protocol.layout_hash()}
    for index, struct in enumerate(protocol.C_STRUCTS):
        first, *rest = struct.fields
        renamed = Struct(
            struct.name,
            struct.dtype.itemsize,
            ("renamed", first.code, first.count),
            *((field.name, field.code, field.count) for field in rest),
        )
        structs = [*protocol.C_STRUCTS[:index], renamed, *protocol.C_STRUCTS[index + 1 :]]
        monkeypatch.setattr(protocol, "C_STRUCTS", structs)
        hashes.add(protocol.layout_hash())
    monkeypatch.undo()
    monkeypatch.setitem(protocol.C_CONSTANTS, "kControlOffset", 384)
    hashes.add(protocol.layout_hash())
    assert len(hashes) == len(protocol.C_STRUCTS) + 2


def test_the_layout_hash_changes_with_an_enum(monkeypatch: pytest.MonkeyPatch) -> None:
    before = protocol.layout_hash()
    monkeypatch.setattr(protocol, "C_ENUMS", [*protocol.C_ENUMS, state.Command])
    assert protocol.layout_hash() != before


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_line_has_one_writer_and_regions_do_not_overlap(geometry: Geometry) -> None:
    constants = protocol.C_CONSTANTS
    slots = geometry.num_slots
    regions = [  # start, bytes, writer
        (constants["kIdentityOffset"], protocol.IDENTITY.dtype.itemsize, "GPU"),
        (constants["kProgressOffset"], protocol.PROGRESS.dtype.itemsize, "GPU"),
        (constants["kCountersOffset"], protocol.COUNTERS.dtype.itemsize, "GPU"),
        (constants["kControlOffset"], protocol.CONTROL.dtype.itemsize, "NIC"),
        (geometry.doorbells_offset, 8 * slots, "NIC"),
        (geometry.cancels_offset, 4 * slots, "NIC"),
        (geometry.slots_offset, slots * geometry.slot_bytes, "NIC"),
        (geometry.status_offset, slots * protocol.SLOT_STATUS.dtype.itemsize, "GPU"),
        (
            geometry.tokens_offset,
            geometry.token_ring_entries * protocol.TOKEN_ENTRY.dtype.itemsize,
            "GPU",
        ),
    ]
    writers: dict[int, str] = {}
    end = 0
    for start, nbytes, writer in regions:
        assert start >= end, "regions overlap"
        assert start % LINE_BYTES == 0
        end = start + nbytes
        for line in range(start // LINE_BYTES, -(-end // LINE_BYTES)):
            assert writers.setdefault(line, writer) == writer
    assert end <= geometry.port_bytes


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_the_largest_record_fits_a_slot(geometry: Geometry) -> None:
    words = protocol.MAX_STOP_TOKEN_IDS + 2 * protocol.MAX_LOGIT_BIAS + geometry.max_context
    assert protocol.RECORD.dtype.itemsize + 4 * words <= geometry.slot_bytes
    assert geometry.slot_bytes % LINE_BYTES == 0
