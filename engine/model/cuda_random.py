"""Models with random weights of a given shape, for measuring: ``random:8b`` and smaller ones."""

from __future__ import annotations

from engine.model.spec import ModelError, ModelSpec

RANDOM_PREFIX = "random:"

SHAPES = {
    "8b": ModelSpec(
        name="random:8b",
        architecture="llama",
        vocab_size=128256,
        max_context=131072,
        bos_id=128000,
        eos_ids=(128001,),
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        mlp_size=14336,
        rope_theta=500000.0,
    ),
    "1b": ModelSpec(
        name="random:1b",
        architecture="llama",
        vocab_size=128256,
        max_context=131072,
        bos_id=128000,
        eos_ids=(128001,),
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        mlp_size=8192,
        rope_theta=500000.0,
    ),
    "tiny": ModelSpec(
        name="random:tiny",
        architecture="llama",
        vocab_size=2048,
        max_context=4096,
        bos_id=1,
        eos_ids=(2,),
        hidden_size=256,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        mlp_size=512,
    ),
}


def random_spec(model: str) -> ModelSpec:
    """The shape that ``random:NAME`` names. Raises ModelError for an unknown one."""
    shape = SHAPES.get(model.removeprefix(RANDOM_PREFIX))
    if shape is None:
        known = ", ".join(RANDOM_PREFIX + name for name in SHAPES)
        raise ModelError(f"no model {model!r} with random weights; there is {known}.")
    return shape
