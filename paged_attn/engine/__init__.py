"""Serving: continuous batching of transformers models over pages.

request.py says what goes in and comes out, scheduler.py which tokens run next, models.py and llama.py how a model runs
over pages, runner.py how a step becomes tokens, sampling.py which token is next; engine.py ties them into a loop.
"""

from paged_attn.engine.engine import Engine, EngineStats, make_cache
from paged_attn.engine.request import Completion, Output, SamplingParams

__all__ = ["Completion", "Engine", "EngineStats", "Output", "SamplingParams", "make_cache"]
