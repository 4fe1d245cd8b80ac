"""What a quantised cache does to a model: perplexity, and agreement with the cache that is not quantised.

A model reads a text with its keys and values in a paged cache, a chunk of tokens at a time, so that attention reads
what the cache stores; once for the model's dtype and once for every 8-bit dtype and kind of scale. The first tokens
calibrate the scales that are fixed (largest magnitude over the largest number of the dtype) and are not scored.
Agreement is the share of scored tokens after which the most probable next token is that of the unquantised cache, KL
divergence the mean over them from its distribution to the other. Run from the repository's root:
``python -m bench.quality``; it needs no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import common
from paged_attn.cli._arguments import device, folder, positive
from paged_attn.cli._models import DTYPES, SMOLLM2_FILE, load_model
from paged_attn.integrations import transformers as paged
from paged_attn.reference import QUANTISED_MAX

TEXT = Path(__file__).parent / "data" / "quality.txt"
UNIT, CALIBRATED = "1", "calibrated"
KINDS = [
    *((dtype, "tensor", UNIT) for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)),
    *((dtype, kind, CALIBRATED) for kind in ("tensor", "head") for dtype in QUANTISED_MAX),
    *((dtype, "token_head", "of the row") for dtype in QUANTISED_MAX),
]


def read(model, token_ids: Tensor, chunk: int, cache: paged.PagedCache) -> Tensor:
    """Log-probabilities ``[T, vocabulary]`` after each token, which the model reads ``chunk`` at a time."""
    logits = [
        model(token_ids[None, begin : begin + chunk], past_key_values=cache, use_cache=True).logits[0].float()
        for begin in range(0, len(token_ids), chunk)
    ]
    return torch.log_softmax(torch.cat(logits), dim=-1)


def new_cache(model, num_tokens: int, **options) -> paged.PagedCache:
    return paged.PagedCache.for_model(model, num_blocks=-(-num_tokens // 16), **options)


def magnitudes(model, token_ids: Tensor, chunk: int) -> Tensor:
    """The largest magnitude of the keys and values of each layer and KV head, ``[num_layers, 2, num_kv_heads]``."""
    cache = new_cache(model, len(token_ids), device=model.device)
    for index in range(cache.kv_cache.num_layers):
        for part in cache.kv_cache.layer(index):
            part.zero_()
    read(model, token_ids, chunk, cache)
    layers = [torch.stack(cache.kv_cache.layer(index)) for index in range(cache.kv_cache.num_layers)]
    return torch.stack(layers).abs().amax(dim=(2, 3, 5)).float()


def set_scales(cache: paged.PagedCache, largest: Tensor) -> None:
    """``largest`` as of ``magnitudes``."""
    kv_cache = cache.kv_cache
    for index in range(kv_cache.num_layers):
        for scale, amax in zip(kv_cache.scales(index), largest[index]):
            scale.copy_((amax if kv_cache.kv_scale == "head" else amax.max()) / QUANTISED_MAX[kv_cache.kv_dtype])


def compare(logp: Tensor, exact: Tensor, token_ids: Tensor, num_calibration: int) -> dict[str, object]:
    """Perplexity, agreement and divergence over the tokens after the first ``num_calibration``."""
    logp, exact, targets = (t[num_calibration - 1 : -1] for t in (logp, exact, token_ids.roll(-1)))
    return {
        "perplexity": F.nll_loss(logp, targets).exp().item(),
        "agreement": (logp.argmax(-1) == exact.argmax(-1)).float().mean().item(),
        "KL x 1000": 1000 * F.kl_div(logp, exact, log_target=True, reduction="batchmean").item(),
    }


@torch.inference_mode()
def measure(model, token_ids: Tensor, *, num_calibration: int, chunk: int = 128) -> list[dict[str, object]]:
    """One row a cache, the unquantised one first; ``token_ids`` ``[T]`` on the model's device."""
    from tqdm import tqdm

    paged.register()
    model.set_attn_implementation("paged_attn")
    exact = read(model, token_ids, chunk, new_cache(model, len(token_ids), device=model.device))
    largest = magnitudes(model, token_ids[:num_calibration], chunk)
    name = str(model.dtype).removeprefix("torch.")
    rows = [{"cache": name, "scale": "", "scale set": "", **compare(exact, exact, token_ids, num_calibration)}]
    for dtype, kind, how in tqdm(KINDS, leave=False, disable=None):
        cache = new_cache(model, len(token_ids), device=model.device, kv_dtype=dtype, kv_scale=kind)
        if how == CALIBRATED:
            set_scales(cache, largest)
        row = compare(read(model, token_ids, chunk, cache), exact, token_ids, num_calibration)
        rows.append({"cache": str(dtype).removeprefix("torch."), "scale": kind, "scale set": how, **row})
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", type=folder, metavar="PATH", help="folder of a transformers causal LM (default: SmolLM2-135M)"
    )
    parser.add_argument("--text", type=Path, default=TEXT, help="default: bench/data/quality.txt")
    parser.add_argument("--max-tokens", type=positive, help="read no more than this many (default: the whole text)")
    parser.add_argument("--calibration", type=positive, default=256, metavar="TOKENS", help="first tokens, not scored")
    parser.add_argument(
        "--chunk", type=positive, default=128, metavar="TOKENS", help="tokens the model reads at a time"
    )
    parser.add_argument("--device", type=device, default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the model and its own cache")
    parser.add_argument("--out", type=Path, default=common.RESULTS, help="folder of quality.json and .md")
    arguments = parser.parse_args(argv)

    model, tokenizer = load_model(arguments.model, arguments.device, DTYPES[arguments.dtype])
    token_ids = tokenizer(arguments.text.read_text(), return_tensors="pt").input_ids[0, : arguments.max_tokens]
    if len(token_ids) < arguments.calibration + 2:
        parser.error(f"--calibration {arguments.calibration} leaves nothing of {len(token_ids)} tokens to score")
    rows = measure(model, token_ids.to(model.device), num_calibration=arguments.calibration, chunk=arguments.chunk)
    shown = [
        row
        | {
            "perplexity": f"{row['perplexity']:.2f}",
            "agreement": f"{row['agreement']:.1%}",
            "KL x 1000": f"{row['KL x 1000']:.2f}",
        }
        for row in rows
    ]
    common.print_table(shown)
    path = common.write_results(
        "quality",
        rows,
        device=arguments.device,
        directory=arguments.out,
        model=arguments.model or SMOLLM2_FILE,
        text=arguments.text.name,
        tokens=len(token_ids),
        calibration=arguments.calibration,
        chunk=arguments.chunk,
    )
    with path.with_suffix(".md").open("w") as table, contextlib.redirect_stdout(table):
        common.print_table(shown)


if __name__ == "__main__":
    main()
