"""transformers' continuous batching on the same GPU: the same shape, streams and lengths.

    python -m loadtests.bench_h200_transformers --out results [--interference]

Random weights of random:8b's shape in bf16, 32 prompts of 100 ids, 512 tokens each, greedy; taking
turns (`use_async_batching` off) and with double buffering (on). Times
are transformers' own stamps of each token. Prints one JSON object, also written to
OUT/transformers.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from engine.model.cuda_random import random_spec
from loadtests.bench_h200_model import interference

NUM_STREAMS, NUM_PROMPT, NUM_TOKENS = 32, 100, 512


def make_model() -> Any:
    """Llama-3-8B's shape, initialised on the GPU."""
    spec = random_spec("random:8b")
    config = transformers.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.mlp_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=8448,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config).eval()


def measure(model: Any, prompts: list[list[int]], is_async: bool) -> dict[str, Any]:
    """One run; seconds of the whole call contain transformers' own set-up and capture."""
    generation = transformers.GenerationConfig(
        max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        use_async_batching=is_async, allow_block_sharing=False, max_memory_percent=0.4
    )
    began_s = time.monotonic()
    outputs = model.generate_batch(
        prompts,
        generation_config=generation,
        continuous_batching_config=batching,
        record_timestamps=True,
    ).values()
    took_s = time.monotonic() - began_s
    stamps = [np.asarray(output.timestamps, np.float64) for output in outputs]
    tpot_ms = [1e3 * (one[-1] - one[0]) / (len(one) - 1) for one in stamps]
    first_s, last_s = max(one[0] for one in stamps), min(one[-1] for one in stamps)
    num_tokens = sum(int(((one > first_s) & (one <= last_s)).sum()) for one in stamps)
    return {
        "tokens": sorted({len(output.generated_tokens) for output in outputs}),
        "tokens_per_s_all_decoding": round(num_tokens / (last_s - first_s), 1),
        "tpot_p50_ms": round(float(np.percentile(tpot_ms, 50)), 3),
        "tpot_p99_ms": round(float(np.percentile(tpot_ms, 99)), 3),
        "call_s": round(took_s, 2),
    }


def transformers_part(
    out: Path | None = None, *, with_interference: bool = False
) -> dict[str, Any]:
    """Both modes, idle, then under interference if wanted; `out` gets what there is after each."""
    model = make_model()
    rng = np.random.default_rng(2)
    prompts = rng.integers(0, 2048, (NUM_STREAMS, NUM_PROMPT)).tolist()
    result: dict[str, Any] = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(0),
        "attention": model.config._attn_implementation,
    }
    for burning in (False, True) if with_interference else (False,):
        with interference() if burning else nullcontext():
            for is_async in (False, True):
                name = f"{'async' if is_async else 'sync'}, {'interference' if burning else 'idle'}"
                result[name] = measure(model, prompts, is_async)
                print(name, json.dumps(result[name]), file=sys.stderr, flush=True)
                if out:
                    out.write_text(json.dumps(result, indent=2) + "\n")
    return result


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.bench_h200_transformers", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--interference", action="store_true", help="that too: many minutes")
    arguments = parser.parse_args(words)
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "transformers.json"
    print(json.dumps(transformers_part(file, with_interference=arguments.interference)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
