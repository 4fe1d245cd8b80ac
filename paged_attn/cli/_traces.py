"""Traces of request lengths, and models of random weights to serve them with."""

from __future__ import annotations

import csv
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch


@dataclass(frozen=True)
class Load:
    """One request of a trace: tokens of prompt and of output, and when it arrives, in seconds."""

    input_len: int
    output_len: int
    arrival: float = 0.0


# 96 requests of this seed are the set of docs/serving.md: 38,363 prompt and 21,177 output tokens, the longest output
# 1,024, and a long tail: 511 steps with at most 8 requests alive.
LOGNORMAL_SEED = 58854


def lognormal(count: int, seed: int = LOGNORMAL_SEED) -> list[Load]:
    """Prompt lengths exp(N(5.5, 1)) clipped to 16..2048, output lengths exp(N(5, 0.9)) clipped to 8..1024."""
    rng = np.random.default_rng(seed)
    inputs = np.clip(np.exp(rng.normal(5.5, 1.0, count)), 16, 2048).astype(int)
    outputs = np.clip(np.exp(rng.normal(5.0, 0.9, count)), 8, 1024).astype(int)
    return [Load(int(i), int(o)) for i, o in zip(inputs, outputs)]


def read_csv(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Columns input_len and output_len of a CSV, int64 ``[num_requests]`` each; without them the command ends."""
    try:
        with path.open(newline="") as file:
            rows = [(int(row["input_len"]), int(row["output_len"])) for row in csv.DictReader(file)]
    except OSError as error:
        sys.exit(f"--trace: {error}")
    except (KeyError, TypeError, ValueError):
        sys.exit(f"--trace: {path} needs columns input_len and output_len with integers")
    if not any(map(sum, rows)):
        sys.exit(f"--trace: {path} holds no request")
    if min(map(min, rows)) < 0:
        sys.exit(f"--trace: {path} holds a negative length")
    inputs, outputs = np.array(rows, dtype=np.int64).T
    return inputs, outputs


def from_csv(path: Path, count: int | None, max_len: int) -> list[Load]:
    """The first ``count`` requests of a CSV (see :func:`read_csv`) that fit ``max_len`` tokens."""
    loads = [Load(max(1, int(i)), max(1, int(o))) for i, o in zip(*read_csv(path))]
    return [load for load in loads if load.input_len + load.output_len <= max_len][:count]


def with_arrivals(loads: list[Load], rate: float | None, seed: int) -> list[Load]:
    """Poisson arrivals of ``rate`` requests a second; None: all at once."""
    if rate is None:
        return loads
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, len(loads)))
    return [Load(load.input_len, load.output_len, float(time)) for load, time in zip(loads, times)]


# Shapes of known models, for weights drawn at random: speed does not depend on their values.
SHAPES = {
    "tiny": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    },
}


def random_model(shape: str, device: str, dtype: torch.dtype):
    """A Llama of one of ``SHAPES`` with random weights."""
    try:
        from transformers import AutoModelForCausalLM, LlamaConfig
    except ImportError:
        sys.exit("transformers is missing: pip install 'paged-attn[transformers]'")
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], bos_token_id=None, eos_token_id=None)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()
