"""What a model is: its numbers, its weights' names, and the layout they have on the device.

Two namings, both defined here and nowhere else:

*Canonical* names are what a model file offers whatever its format (``engine.model.gguf``,
``engine.model.safetensors``): float32, ``[out_features, in_features]``, RoPE in the half-split
order of Hugging Face ("rotate_half").

*Device* names are what the device program takes: the same numbers with q, k, v stacked into one
matrix and gate, up into another, so that nothing has to be copied again on the device.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import UserError

Weight = npt.NDArray[np.float32]
ReadWeight = Callable[[str], Weight]


class ModelError(UserError):
    """A model that is missing, broken or of a kind that is not supported."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model's numbers; everything the device program needs besides the weights.

    The scripted model has zero layers and heads: it has no weights and no KV of its own.
    """

    name: str
    architecture: str
    """"llama", "mistral", "qwen2", "qwen3" or "scripted"."""
    vocab_size: int
    max_context: int
    """Positions the model was made for."""
    bos_id: int | None
    eos_ids: tuple[int, ...]
    hidden_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    mlp_size: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_divisors: tuple[float, ...] = ()
    """What each of the head_dim / 2 rotary frequencies is divided by (context scaling);
    empty: by nothing."""
    tied_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False

    @property
    def q_size(self) -> int:
        """Numbers of all query heads of one token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Numbers of all key (or value) heads of one token in one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache that one token takes over all layers."""
        return self.num_layers * 2 * self.kv_size * 4

    @property
    def weights_bytes(self) -> int:
        """Bytes of all device weights."""
        return sum(4 * int(np.prod(shape)) for shape in device_weights(self).values())

    def inverse_frequencies(self) -> Weight:
        """The angle per position of each rotary pair: float32[head_dim / 2]."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        frequencies: Weight = np.power(np.float32(self.rope_theta), -exponents, dtype=np.float32)
        if self.rope_divisors:
            frequencies /= np.asarray(self.rope_divisors, dtype=np.float32)
        return frequencies

    def to_json(self) -> str:
        """As JSON, for the way to another process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ModelSpec:
        """The inverse of :meth:`to_json`; an unknown key raises TypeError."""
        fields: dict[str, Any] = json.loads(text)
        for key in ("eos_ids", "rope_divisors"):
            fields[key] = tuple(fields[key])
        return cls(**fields)

    def check(self) -> None:
        """Raise ModelError if the numbers cannot be those of a model that runs here."""
        for key in ("vocab_size", "max_context", "hidden_size", "num_layers", "mlp_size"):
            if getattr(self, key) <= 0:
                raise ModelError(f"{self.name}: {key} is {getattr(self, key)}, not positive.")
        if self.head_dim <= 0 or self.head_dim % 2 or self.num_kv_heads <= 0:
            raise ModelError(
                f"{self.name}: {self.num_kv_heads} KV heads of {self.head_dim} numbers "
                "cannot be served."
            )
        if self.num_heads <= 0 or self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.name}: {self.num_heads} query heads cannot be shared among "
                f"{self.num_kv_heads} KV heads."
            )
        if self.rope_divisors and len(self.rope_divisors) != self.head_dim // 2:
            raise ModelError(
                f"{self.name}: {len(self.rope_divisors)} rotary scaling factors for "
                f"{self.head_dim // 2} rotary pairs."
            )


def canonical_weights(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights that a model file of ``spec`` must offer."""
    hidden = spec.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, hidden)}
    for layer in range(spec.num_layers):
        prefix = f"layers.{layer}."
        shapes[prefix + "attn_norm"] = (hidden,)
        for name, size in (("q", spec.q_size), ("k", spec.kv_size), ("v", spec.kv_size)):
            shapes[prefix + name] = (size, hidden)
            if spec.qkv_bias:
                shapes[prefix + name + "_bias"] = (size,)
        if spec.qk_norm:
            shapes[prefix + "q_norm"] = (spec.head_dim,)
            shapes[prefix + "k_norm"] = (spec.head_dim,)
        shapes[prefix + "o"] = (hidden, spec.q_size)
        shapes[prefix + "mlp_norm"] = (hidden,)
        shapes[prefix + "gate"] = (spec.mlp_size, hidden)
        shapes[prefix + "up"] = (spec.mlp_size, hidden)
        shapes[prefix + "down"] = (hidden, spec.mlp_size)
    shapes["norm"] = (hidden,)
    if not spec.tied_embeddings:
        shapes["head"] = (spec.vocab_size, hidden)
    return shapes


FUSED = {
    "qkv": ("q", "k", "v"),
    "qkv_bias": ("q_bias", "k_bias", "v_bias"),
    "gate_up": ("gate", "up"),
}
"""Device weight -> the canonical weights stacked in it, along their first axis."""

_FUSED_INTO = {part: fused for fused, parts in FUSED.items() for part in parts}


def device_weights(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the arrays that the device program takes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in canonical_weights(spec).items():
        prefix, _, leaf = name.rpartition(".")
        leaf = _FUSED_INTO.get(leaf, leaf)
        target = f"{prefix}.{leaf}" if prefix else leaf
        stacked = shapes.get(target)
        shapes[target] = shape if stacked is None else (stacked[0] + shape[0], *shape[1:])
    return shapes


def read_device_weights(spec: ModelSpec, read: ReadWeight) -> Iterator[tuple[str, Weight]]:
    """Yield every device weight once, holding one at a time.

    ``read`` gives a canonical weight by name. Raises ModelError for one of another shape than
    ``spec`` says, or with a number that is not finite.
    """
    canonical = canonical_weights(spec)

    def checked(name: str) -> Weight:
        weight = read(name)
        if weight.shape != canonical[name]:
            raise ModelError(
                f"{spec.name}: weight {name} has shape {list(weight.shape)}, "
                f"but the model's numbers say {list(canonical[name])}."
            )
        if not np.isfinite(weight.sum(dtype=np.float64)):
            raise ModelError(f"{spec.name}: weight {name} holds numbers that are not finite.")
        return weight

    for target in device_weights(spec):
        prefix, _, leaf = target.rpartition(".")
        parts = [f"{prefix}.{part}" if prefix else part for part in FUSED.get(leaf, (leaf,))]
        weights = [checked(part) for part in parts]
        fused = weights[0] if len(weights) == 1 else np.concatenate(weights)
        yield target, np.ascontiguousarray(fused, dtype=np.float32)
