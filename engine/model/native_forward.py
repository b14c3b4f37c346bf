"""The forward pass as one C++ library (csrc/llama.cpp), compiled on first use and cached.

Why not library calls: at one to sixteen rows a matrix product is bound by the memory's bandwidth,
of which torch's kernels reach a quarter to a half here (``loadtests/bench_model.py`` measures it),
and their rounding depends on the number of rows. These kernels stream the weights once and sum
each number in a fixed order, so a sequence's logits are the same, bit for bit, alone or in a
batch, with its prompt in one chunk or in many, before and after a preemption.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.model.batch import Batch
from engine.model.forward import Beats, Floats, rotary_table
from engine.model.spec import ModelError, ModelSpec, Weight
from engine.native import build_library

_SOURCE = Path(__file__).parent / "csrc" / "llama.cpp"
_LAYER_WEIGHTS = (
    "attn_norm",
    "qkv",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "o",
    "mlp_norm",
    "gate_up",
    "down",
)


class _Layer(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in _LAYER_WEIGHTS]


class _Model(ctypes.Structure):
    _fields_ = [
        ("hidden_size", c_int32),
        ("num_layers", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("mlp_size", c_int32),
        ("vocab_size", c_int32),
        ("page_size", c_int32),
        ("norm_eps", c_float),
        ("num_threads", c_int32),
        ("embed", c_void_p),
        ("norm", c_void_p),
        ("head", c_void_p),
        ("cos_sin", c_void_p),
        ("layers", POINTER(_Layer)),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("num_tokens", c_int32),
        ("num_rows", c_int32),
        ("num_sampled", c_int32),
        ("max_pages_per_seq", c_int32),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("kv_index", c_void_p),
        ("query_start", c_void_p),
        ("query_length", c_void_p),
        ("context_length", c_void_p),
        ("seq", c_void_p),
        ("last_token", c_void_p),
        ("block_tables", c_void_p),
        ("kv_cache", c_void_p),
        ("num_pages", c_int64),
        ("logits", c_void_p),
        ("beats", c_void_p),
        ("num_beats", c_int64),
        ("beat_stride", c_int64),
    ]


@cache
def _library() -> ctypes.CDLL:
    path = build_library(
        [_SOURCE],
        include_dirs=[_SOURCE.parent],
        extra_flags=["-ffp-contract=fast"],
        name="llama",
    )
    library = ctypes.CDLL(str(path))
    library.blinkbed_llama_open.restype = c_void_p
    library.blinkbed_llama_open.argtypes = [POINTER(_Model)]
    library.blinkbed_llama_close.argtypes = [c_void_p]
    library.blinkbed_llama_close.restype = None
    library.blinkbed_llama_forward.argtypes = [c_void_p, POINTER(_Batch)]
    return library


def supports(spec: ModelSpec) -> bool:
    """Whether a head is a whole number of machine vectors, which the attention kernel needs."""
    return spec.head_dim % int(_library().blinkbed_llama_lanes()) == 0


class NativeForward:
    """A ``forward.Forward``; one call is one native call, without the interpreter's lock."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, Weight],
        *,
        page_size: int,
        max_context: int,
        num_threads: int,
    ) -> None:
        self.spec = spec
        self.beats: Beats | None = None
        self._handle: int | None = None
        cos_sin = rotary_table(spec, max_context)
        layers = (_Layer * spec.num_layers)()
        for index, layer in enumerate(layers):
            for name in _LAYER_WEIGHTS:
                weight = weights.get(f"layers.{index}.{name}")
                setattr(layer, name, None if weight is None else weight.ctypes.data)
        model = _Model(
            hidden_size=spec.hidden_size,
            num_layers=spec.num_layers,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            mlp_size=spec.mlp_size,
            vocab_size=spec.vocab_size,
            page_size=page_size,
            norm_eps=spec.norm_eps,
            num_threads=num_threads,
            embed=weights["embed"].ctypes.data,
            norm=weights["norm"].ctypes.data,
            head=weights.get("head", weights["embed"]).ctypes.data,
            cos_sin=cos_sin.ctypes.data,
            layers=layers,
        )
        self._kept = (cos_sin, dict(weights))  # the library holds pointers into these
        self._logits = np.empty((0, spec.vocab_size), dtype=np.float32)
        self._handle = _library().blinkbed_llama_open(ctypes.byref(model))
        if self._handle is None:
            raise ModelError("not enough memory, or threads, for the model's forward pass.")

    def __call__(
        self, batch: Batch, block_tables: npt.NDArray[np.int32], kv_cache: Floats
    ) -> Floats:
        num_sampled = len(batch.sampled)
        if len(self._logits) < num_sampled:
            self._logits = np.empty((num_sampled, self.spec.vocab_size), dtype=np.float32)
        native = _Batch(
            num_tokens=batch.num_tokens,
            num_rows=len(batch.rows),
            num_sampled=num_sampled,
            max_pages_per_seq=block_tables.shape[1],
            token_ids=batch.token_ids.ctypes.data,
            positions=batch.positions.ctypes.data,
            kv_index=batch.kv_index.ctypes.data,
            query_start=batch.query_start.ctypes.data,
            query_length=batch.query_length.ctypes.data,
            context_length=batch.context_length.ctypes.data,
            seq=batch.seq.ctypes.data,
            last_token=batch.last_token.ctypes.data,
            block_tables=block_tables.ctypes.data,
            kv_cache=kv_cache.ctypes.data,
            num_pages=kv_cache.shape[2],
            logits=self._logits.ctypes.data,
        )
        if self.beats is not None:
            native.beats = self.beats.ctypes.data
            native.num_beats = len(self.beats)
            native.beat_stride = self.beats.strides[0] // self.beats.itemsize
        if _library().blinkbed_llama_forward(self._handle, ctypes.byref(native)) != 0:
            raise MemoryError("the forward pass found no memory for its intermediate results")
        return self._logits[:num_sampled]

    def close(self) -> None:
        if self._handle is not None:
            _library().blinkbed_llama_close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.close()
