"""Weights and metadata of a GGUF file (any quantization; dequantized to float32).

The file's layout and the dequantization are the ``gguf`` package's; here are the names, the
numbers, and one difference in layout: files of architecture "llama" keep the rows of q and k
permuted, because their RoPE rotates neighbouring numbers, ours the two halves of a head.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from engine.model.spec import ModelError, ModelSpec, Weight, canonical_weights

_ARCHITECTURES = ("llama", "qwen2", "qwen3")

_LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_OUTER_NAMES = {
    "embed": "token_embd.weight",
    "norm": "output_norm.weight",
    "head": "output.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"


def _file_name(canonical: str) -> str:
    if canonical in _OUTER_NAMES:
        return _OUTER_NAMES[canonical]
    _, layer, leaf = canonical.split(".")
    return f"blk.{layer}.{_LAYER_NAMES[leaf]}"


class GgufFile:
    """An open GGUF file: ``spec``, ``metadata``, and weights by canonical name.

    Raises ModelError for a file that is missing, truncated, of another kind, or of an
    architecture that is not supported.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        architecture = self.metadata("general.architecture")
        if architecture not in _ARCHITECTURES:
            raise ModelError(
                f"{path}: architecture {architecture!r} is not supported; "
                f"GGUF files of {', '.join(_ARCHITECTURES)} are."
            )
        self.spec = self._read_spec(architecture, name or path.stem)
        self.spec.check()
        missing = [
            _file_name(weight)
            for weight in canonical_weights(self.spec)
            if _file_name(weight) not in self._tensors
        ]
        if missing:
            raise ModelError(
                f"{path}: {len(missing)} tensors are missing, the first is {missing[0]}; "
                "the file is incomplete or of another architecture than it says."
            )

    def metadata(self, key: str, default: Any = None) -> Any:
        """The value of a metadata key as a Python object, or ``default``."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def read(self, name: str) -> Weight:
        """The weight of a canonical name, float32, in canonical layout."""
        weight = self._dequantize(_file_name(name))
        leaf = name.rpartition(".")[2]
        if self.spec.architecture == "llama" and leaf in ("q", "k", "q_bias", "k_bias"):
            heads = self.spec.num_heads if leaf.startswith("q") else self.spec.num_kv_heads
            weight = _halves_from_pairs(weight, heads)
        return weight

    def _dequantize(self, file_name: str) -> Weight:
        tensor = self._tensors[file_name]
        try:
            weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise ModelError(
                f"{self.path}: tensor {file_name} has quantization {tensor.tensor_type.name}, "
                "which cannot be read; convert the file to F16, Q8_0, Q4_K or the like."
            ) from error
        # Unquantized tensors come with the file's axes already in row-major order.
        return np.asarray(weight, dtype=np.float32).reshape(tuple(reversed(tensor.shape.tolist())))

    def _read_spec(self, architecture: str, name: str) -> ModelSpec:
        def number(key: str, default: float | None = None) -> Any:
            value = self.metadata(f"{architecture}.{key}", default)
            if not isinstance(value, int | float):
                raise ModelError(f"{self.path}: metadata {architecture}.{key} is missing.")
            return value

        heads, hidden = int(number("attention.head_count")), int(number("embedding_length"))
        head_dim = int(number("attention.key_length", hidden // max(heads, 1)))
        self._refuse_variants(architecture, head_dim)
        context = int(number("context_length"))
        divisors = self._rope_divisors(architecture, head_dim)
        eos_ids = {self.metadata(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")}
        embed = self._tensors.get(_OUTER_NAMES["embed"])
        return ModelSpec(
            name=name,
            architecture=architecture,
            vocab_size=int(embed.shape[1]) if embed is not None else 0,
            max_context=context,
            bos_id=self.metadata("tokenizer.ggml.bos_token_id"),
            eos_ids=tuple(sorted(int(eos) for eos in eos_ids if eos is not None)),
            hidden_size=hidden,
            num_layers=int(number("block_count")),
            num_heads=heads,
            num_kv_heads=int(number("attention.head_count_kv", heads)),
            head_dim=head_dim,
            mlp_size=int(number("feed_forward_length")),
            norm_eps=float(number("attention.layer_norm_rms_epsilon", 1e-5)),
            rope_theta=float(number("rope.freq_base", 10000.0)),
            rope_divisors=divisors,
            tied_embeddings=_OUTER_NAMES["head"] not in self._tensors,
            qkv_bias="blk.0.attn_q.bias" in self._tensors,
            qk_norm="blk.0.attn_q_norm.weight" in self._tensors,
        )

    def _refuse_variants(self, architecture: str, head_dim: int) -> None:
        """Raise ModelError for what the file may say and this program cannot do."""
        rotated = self.metadata(f"{architecture}.rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise ModelError(
                f"{self.path}: only {rotated} of {head_dim} numbers of a head are rotated, "
                "which is not supported."
            )
        if self.metadata(f"{architecture}.expert_count", 0):
            raise ModelError(f"{self.path}: mixtures of experts are not supported.")
        window = self.metadata(f"{architecture}.attention.sliding_window", 0)
        context = self.metadata(f"{architecture}.context_length", 0)
        if window and window < context:
            raise ModelError(
                f"{self.path}: a sliding window of {window} tokens, shorter than the context of "
                f"{context}, is not supported."
            )

    def _rope_divisors(self, architecture: str, head_dim: int) -> tuple[float, ...]:
        kind = self.metadata(f"{architecture}.rope.scaling.type", "none")
        if kind == "linear":
            factor = float(self.metadata(f"{architecture}.rope.scaling.factor", 1.0))
            return (factor,) * (head_dim // 2)
        if kind != "none":
            raise ModelError(
                f"{self.path}: rotary scaling {kind!r} is not supported; linear and llama3 are."
            )
        if _ROPE_FACTORS in self._tensors:  # llama3 scaling, worked out by the converter
            return tuple(self._dequantize(_ROPE_FACTORS).ravel().tolist())
        return ()


class _Reader(gguf.GGUFReader):  # type: ignore[misc]
    """The reader over a plain array: memmap's bookkeeping at each slice doubles its time."""

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, mapped: npt.NDArray[np.uint8]) -> None:
        self._data: npt.NDArray[np.uint8] = np.asarray(mapped)


def _open(path: Path) -> gguf.GGUFReader:
    if not path.is_file():
        raise ModelError(f"{path}: no such model file.")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file (it does not begin with 'GGUF').")
    try:
        return _Reader(path)
    except (ValueError, LookupError, ArithmeticError, TypeError) as error:
        raise ModelError(
            f"{path} is truncated or damaged ({error}); fetch or copy it again."
        ) from error


def _halves_from_pairs(weight: Weight, num_heads: int) -> Weight:
    """Undo the row permutation of GGUF's llama q and k: pairs (0,1), (2,3).. to (0,n/2).."""
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)
