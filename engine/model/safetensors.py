"""Weights and numbers of a Hugging Face folder: config.json, and safetensors in one file or more.

Architectures: Llama, Mistral, Qwen2, Qwen3. The file format is the ``safetensors`` package's;
here are the names and the numbers. Its NumPy side has no bfloat16, so torch reads the tensors.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from engine.model.spec import ModelError, ModelSpec, Weight, canonical_weights

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
_OUTER_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}


def file_name(canonical: str) -> str:
    """The tensor that Hugging Face's models keep a canonical weight in."""
    if canonical in _OUTER_NAMES:
        return _OUTER_NAMES[canonical]
    _, layer, leaf = canonical.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[leaf]}"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model's folder; raises ModelError in one sentence."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} holds no {path.name}: not a model's folder.") from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object.")
    return value


class SafetensorsFolder:
    """An open Hugging Face folder: ``spec``, and weights by canonical name.

    Raises ModelError for a folder without a model, a damaged file, or a model that is not
    supported.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self._config = read_json(path / "config.json")
        self._files = self._open_files()
        self.spec = self._read_spec(name or path.resolve().name)
        self.spec.check()
        missing = [
            file_name(weight)
            for weight in canonical_weights(self.spec)
            if file_name(weight) not in self._files
        ]
        if missing:
            raise ModelError(
                f"{path}: {len(missing)} tensors are missing, the first is {missing[0]}; "
                "the download is incomplete."
            )

    def read(self, name: str) -> Weight:
        """The weight of a canonical name, as float32."""
        stored = file_name(name)
        tensor = self._files[stored].get_tensor(stored)
        if tensor.dtype not in _FLOATS:
            raise ModelError(
                f"{self.path}: tensor {stored} is {str(tensor.dtype).removeprefix('torch.')}; "
                "float32, float16 and bfloat16 are supported (quantized models are not)."
            )
        weight: Weight = tensor.float().numpy()
        return weight

    def _open_files(self) -> dict[str, Any]:
        """Tensor name -> the open file that holds it."""
        single, index = self.path / "model.safetensors", self.path / "model.safetensors.index.json"
        if single.is_file():
            names = {single.name}
        elif index.is_file():
            names = set(read_json(index).get("weight_map", {}).values())
        else:
            raise ModelError(f"{self.path} holds no safetensors (model.safetensors or its index).")
        files: dict[str, Any] = {}
        for name in sorted(names):
            path = self.path / name
            if not path.is_file():
                raise ModelError(f"{path} is missing; the download is incomplete.")
            try:
                file: Any = safetensors.safe_open(path, framework="pt")
                files.update(dict.fromkeys(file.keys(), file))
            except (safetensors.SafetensorError, OSError) as error:
                raise ModelError(
                    f"{path} is truncated or damaged ({error}); get it again."
                ) from error
        return files

    def _read_spec(self, name: str) -> ModelSpec:
        config = self._config
        architectures = config.get("architectures") or ["none"]
        architecture = _ARCHITECTURES.get(architectures[0])
        if architecture is None:
            raise ModelError(
                f"{self.path}: architecture {architectures[0]} is not supported; "
                f"{', '.join(_ARCHITECTURES)} are."
            )
        heads, hidden = self._number("num_attention_heads"), self._number("hidden_size")
        head_dim = int(config.get("head_dim") or hidden // max(heads, 1))
        context = self._number("max_position_embeddings")
        self._refuse_variants(architecture, context)
        rope = _rope_parameters(config)
        tied = bool(config.get("tie_word_embeddings", False)) or (
            _OUTER_NAMES["head"] not in self._files
        )
        return ModelSpec(
            name=name,
            architecture=architecture,
            vocab_size=self._number("vocab_size"),
            max_context=context,
            bos_id=_first(config.get("bos_token_id")),
            eos_ids=self._eos_ids(),
            hidden_size=hidden,
            num_layers=self._number("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            mlp_size=self._number("intermediate_size"),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            rope_divisors=self._rope_divisors(rope, head_dim),
            tied_embeddings=tied,
            qkv_bias=file_name("layers.0.q_bias") in self._files,
            qk_norm=architecture == "qwen3",
        )

    def _number(self, key: str) -> int:
        value = self._config.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelError(f"{self.path / 'config.json'}: {key}={value!r} is not a number.")
        return value

    def _eos_ids(self) -> tuple[int, ...]:
        """generation_config.json knows all of them, config.json often only the first."""
        generation = self.path / "generation_config.json"
        sources = [read_json(generation)] if generation.is_file() else []
        for source in [*sources, self._config]:
            eos = source.get("eos_token_id")
            if eos is not None:
                return tuple(int(one) for one in (eos if isinstance(eos, list) else [eos]))
        return ()

    def _refuse_variants(self, architecture: str, context: int) -> None:
        """Raise ModelError for what the configuration may say and this program cannot do."""
        config = self._config
        window = config.get("sliding_window")
        if not config.get("use_sliding_window", architecture == "mistral"):
            window = None
        if window is not None and window < context:
            raise ModelError(
                f"{self.path}: a sliding window of {window} tokens, shorter than the context of "
                f"{context}, is not supported."
            )
        if config.get("hidden_act", "silu") != "silu":
            raise ModelError(f"{self.path}: hidden_act={config['hidden_act']!r}, not silu.")
        for name in ("self_attn.o_proj.bias", "mlp.gate_proj.bias", "mlp.down_proj.bias"):
            if f"model.layers.0.{name}" in self._files:
                raise ModelError(f"{self.path}: a bias in {name} is not supported.")
        if config.get("quantization_config"):
            raise ModelError(f"{self.path}: quantized safetensors are not supported.")

    def _rope_divisors(self, rope: dict[str, Any], head_dim: int) -> tuple[float, ...]:
        kind = rope.get("rope_type", rope.get("type", "default"))
        if float(rope.get("partial_rotary_factor", 1.0)) != 1.0:
            raise ModelError(f"{self.path}: heads that are rotated in part are not supported.")
        if kind == "default":
            return ()
        if kind == "linear":
            return (float(rope["factor"]),) * (head_dim // 2)
        if kind == "llama3":
            return _llama3_divisors(rope, head_dim)
        raise ModelError(
            f"{self.path}: rotary scaling {kind!r} is not supported; linear and llama3 are."
        )


def _first(value: Any) -> int | None:
    if isinstance(value, list):
        value = value[0] if value else None
    return None if value is None else int(value)


def _rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE's numbers, which newer configurations keep under one key and older ones under two."""
    outer = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config}
    return {**outer, **(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _llama3_divisors(rope: dict[str, Any], head_dim: int) -> tuple[float, ...]:
    """Llama 3.1's scaling: long waves are slowed by ``factor``, short ones kept, others between."""
    factor, original = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    exponents = np.arange(0, head_dim, 2) / head_dim
    wavelengths = 2 * math.pi * float(rope["rope_theta"]) ** exponents
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    return tuple((1.0 / ((1.0 - smooth) / factor + smooth)).tolist())
