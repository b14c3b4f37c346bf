"""Device weights as the CUDA forward pass wants them.

Against ``engine.model.spec``: the weight of each RMSNorm is folded into the matrix behind it, and
the rows of q and k are ordered such that the two numbers that RoPE turns together are neighbours;
so are the rows of gate and up that belong together.
Scores do not change by a common order of q and k, so the KV cache simply holds that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from engine.model.spec import ModelSpec, device_weights

Tensors = dict[str, torch.Tensor]


def paired_order(spec: ModelSpec) -> npt.NDArray[np.int64]:
    """Rows of the stacked q, k, v matrix: within each head of q and k, 0, D/2, 1, D/2 + 1, ..."""
    half = spec.head_dim // 2
    within = np.stack([np.arange(half), np.arange(half) + half], axis=1).reshape(-1)
    turned = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    heads = np.arange(turned).reshape(-1, spec.head_dim)[:, within].reshape(-1)
    return np.concatenate([heads, np.arange(turned, turned + spec.kv_size)])


def load_weights(
    spec: ModelSpec,
    weights: Iterable[tuple[str, npt.NDArray[np.float32]]],
    device: torch.device,
    dtype: torch.dtype,
) -> Tensors:
    """Weights by name on `device`. Folding is done in float32 before the only rounding."""
    raw = {
        name: torch.from_numpy(np.ascontiguousarray(value)).to(device, non_blocking=True)
        if value.ndim == 1
        else torch.from_numpy(np.ascontiguousarray(value))
        for name, value in weights
    }
    order = torch.from_numpy(paired_order(spec))
    half = spec.head_dim // 2
    within = torch.stack([torch.arange(half), torch.arange(half) + half], dim=1).reshape(-1)

    def folded(matrix: str, norm: str) -> torch.Tensor:
        return (raw[matrix].to(device) * raw[norm][None, :]).to(dtype)

    ready: Tensors = {"embed": raw["embed"].to(device).to(dtype)}
    for layer in range(spec.num_layers):
        p = f"layers.{layer}."
        ready[p + "qkv"] = folded(p + "qkv", p + "attn_norm")[order.to(device)].contiguous()
        gate, up = folded(p + "gate_up", p + "mlp_norm").chunk(2)
        ready[p + "gate_up"] = torch.stack([gate, up], dim=1).reshape(-1, spec.hidden_size)
        for name in ("o", "down"):
            ready[p + name] = raw[p + name].to(device).to(dtype)
        if spec.qkv_bias:
            ready[p + "qkv_bias"] = raw[p + "qkv_bias"][order.to(device)].to(dtype)
        if spec.qk_norm:
            for name in ("q_norm", "k_norm"):
                ready[p + name] = raw[p + name][within.to(device)].to(dtype)
    ready["head"] = folded("embed" if spec.tied_embeddings else "head", "norm")
    return ready


def random_weights(spec: ModelSpec, seed: int = 0) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Weights in the canonical (device) naming, for tests: small models only."""
    generator = np.random.default_rng(seed)
    for name, shape in device_weights(spec).items():
        value = generator.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            yield name, (1 + 0.1 * value if "norm" in name else 0.1 * value)
        else:
            yield name, value / np.float32(np.sqrt(shape[1]))


def random_device_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Tensors:
    """Random weights made on the device itself, ready for the forward pass: any size."""
    generator = torch.Generator(device).manual_seed(0)
    ready: Tensors = {}
    for name, shape in device_weights(spec).items():
        leaf = name.rpartition(".")[2]
        if len(shape) == 1 and leaf in ("attn_norm", "mlp_norm", "norm"):
            continue  # folded: ones
        if len(shape) == 1:
            ready[name] = torch.ones(shape, device=device, dtype=dtype)
            continue
        value = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        ready[name] = value if leaf == "embed" else value.mul_(shape[1] ** -0.5)
    if spec.tied_embeddings:
        ready["head"] = ready["embed"] * spec.hidden_size**-0.5
    return ready
