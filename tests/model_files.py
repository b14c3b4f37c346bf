"""Makes small model files: random models saved by transformers, and GGUF files of the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers

NUMBERS: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rope_theta": 5000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def random_model(architecture: str, **changes: Any) -> Any:
    """A model with random weights large enough that each part of it matters."""
    numbers = {**NUMBERS, **changes}
    if architecture == "Mistral":
        numbers.setdefault("sliding_window", None)
    config = getattr(transformers, f"{architecture}Config")(**numbers)
    torch.manual_seed(7)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.dim() > 1 or name.endswith("bias") else 0.1
            parameter.add_(torch.randn_like(parameter) * spread)
    return model


def save_folder(model: Any, folder: Path, **options: Any) -> Path:
    """Save as a Hugging Face folder."""
    model.save_pretrained(folder, **options)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_level_tokenizer() -> tokenizers.Tokenizer:
    """A small byte-level BPE with less than 320 ids; 0 to 2 are special, the last is added text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=319,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 9, trainer)
    tokenizer.add_tokens(["<tool call \u00fc>"])
    return tokenizer


def save_gguf(model: Any, path: Path, *, tokens: bool = True) -> Path:
    """Save a Llama as llama.cpp's converter does: rows of q and k permuted for its RoPE."""
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if tokens:
        add_byte_tokenizer(writer, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in state.items():
        values = tensor.numpy()
        for part, heads in (
            ("q_proj", config.num_attention_heads),
            ("k_proj", config.num_key_value_heads),
        ):
            if part in name:
                halves = values.reshape(heads, 2, -1, values.shape[1])
                values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_byte_tokenizer(writer: Any, vocab_size: int) -> None:
    """A sentencepiece vocabulary: three special tokens, 256 bytes, then a few pieces."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "a", "b", "ab", "\u2581ab", "\u00e9", "\u2581a", "abab"]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    scores = [0.0] * 259 + [-float(index) for index in range(len(pieces) - 259)]
    padding = vocab_size - len(pieces)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces + [f"[unused{index}]" for index in range(padding)])
    writer.add_token_scores(scores + [-1e6] * padding)
    writer.add_token_types(kinds + [5] * padding)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
