"""The serving loop: requests in, tokens out, one scheduler step at a time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

import paged_attn
from paged_attn.engine.models import make_forward
from paged_attn.engine.request import Completion, Output, Request, SamplingParams, Sequence, State
from paged_attn.engine.runner import Runner
from paged_attn.engine.scheduler import Scheduler, Step


@dataclass
class EngineStats:
    """Counts since the engine began. Times in seconds; ``host_time`` leaves out waiting for the GPU."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    host_time: float = 0.0


class Engine:
    """Continuous batching of a transformers causal LM over a :class:`paged_attn.PagedKVCache`.

        engine = Engine(model, num_blocks=4096)
        for completion in engine.generate(prompts, SamplingParams(max_tokens=64)):
            ...

    Args:
        model: in eval mode, on its device. Its attention implementation becomes "paged_attn". Llama-shaped models run
            through a fused forward pass (``fused``: None decides, False never, True or an error).
        cache: the pages; made from the model's shape where left out, of ``num_blocks`` blocks (or, on a GPU, of 90% of
            its free memory). Further keywords go to :class:`paged_attn.PagedKVCache`.
        max_num_seqs: most sequences in a step.
        max_batch_tokens: most tokens in a step; longer prompts run in chunks beside the decodes.
        max_model_len: longest sequence; default what the model was made for.
        preemption: "recompute" or "swap" (to the cache's host blocks, while there are enough).
        cuda_graphs: run decodes and small mixed steps as captured graphs; default: on a GPU, where the model allows it.
        compile: torch.compile the small kernels of a fused model.
        overlap: launch a step before the tokens of the one before it are read; default: on a GPU.
        tokenizer: needed for stop strings only.
        eos_token_ids: default: the model's generation config.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: paged_attn.PagedKVCache | None = None,
        *,
        max_num_seqs: int = 256,
        max_batch_tokens: int = 8192,
        max_model_len: int | None = None,
        preemption: str = "recompute",
        fused: bool | None = None,
        cuda_graphs: bool | None = None,
        compile: bool = False,
        overlap: bool | None = None,
        tokenizer=None,
        eos_token_ids: Iterable[int] | None = None,
        **cache_options,
    ):
        if preemption not in ("recompute", "swap"):
            raise ValueError(f'preemption: expected "recompute" or "swap", got {preemption!r}')
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs: expected at least 1, got {max_num_seqs}")
        if max_batch_tokens < max_num_seqs:
            raise ValueError(f"max_batch_tokens: expected at least max_num_seqs {max_num_seqs}, got {max_batch_tokens}")
        if max_model_len is not None and max_model_len < 1:
            raise ValueError(f"max_model_len: expected None or at least 1, got {max_model_len}")
        if cache is not None and cache_options:
            raise ValueError(f"{next(iter(cache_options))}: expected without a cache, whose option it is")
        on_gpu = model.device.type == "cuda"
        self.cache = make_cache(model, **cache_options) if cache is None else cache
        for name, needed in _cache_shape(model).items():
            if getattr(self.cache, name) != needed:
                raise ValueError(f"cache: expected {name} {needed} like the model, got {getattr(self.cache, name)}")
        self.max_model_len = min(max_model_len or _trained_length(model), _trained_length(model))
        self.vocab_size = model.get_input_embeddings().num_embeddings
        self.tokenizer = tokenizer
        self.eos_token_ids = _eos(model) if eos_token_ids is None else frozenset(eos_token_ids)
        self.scheduler = Scheduler(self.cache, max_num_seqs, max_batch_tokens, preemption, _window(model))
        self.overlap = on_gpu if overlap is None else overlap
        self.runner = Runner(
            make_forward(model, self.cache, fused, compile),
            model.device,
            max_num_seqs,
            max_batch_tokens,
            -(-self.max_model_len // self.cache.block_size),
            cuda_graphs=on_gpu if cuda_graphs is None else cuda_graphs,
        )
        self.requests: dict[int | str, Request] = {}
        self._counts = EngineStats()
        self._seq_ids, self._request_ids = itertools.count(), itertools.count()
        self._in_flight: Step | None = None
        self._news: list[Output] = []  # of cancelled requests, for the next step to report

    # Requests

    def add_request(
        self,
        prompt: Items[int],
        params: SamplingParams | None = None,
        request_id: int | str | None = None,
        salt: str | None = None,
    ) -> int | str:
        """Queue a prompt of token ids; returns the request's id. ``salt``: share cached prefixes only under the same.

        Raises:
            ValueError: an empty prompt, an id in use, or a request that this engine could never hold.
        """
        params = SamplingParams() if params is None else params
        if request_id is None:
            request_id = next(number for number in self._request_ids if number not in self.requests)
        prompt = [int(token) for token in prompt]
        self._check(request_id, prompt, params, salt)
        request = Request(request_id, prompt, params, salt)
        request.sequences = [Sequence(next(self._seq_ids), request, i, list(prompt)) for i in range(params.n)]
        self.requests[request_id] = request
        self.scheduler.enqueue(request)
        return request_id

    def _check(self, request_id: int | str, prompt: list[int], params: SamplingParams, salt: str | None) -> None:
        if request_id in self.requests:
            raise ValueError(f"request_id: {request_id!r} is in use")
        if not prompt:
            raise ValueError("prompt: expected at least one token, got none")
        if max(prompt) >= self.vocab_size:
            raise ValueError(f"prompt: expected ids below the model's {self.vocab_size}, got {max(prompt)}")
        length = len(prompt) + params.max_tokens
        if length > self.max_model_len:
            raise ValueError(f"prompt: {length} tokens with max_tokens, the engine's longest is {self.max_model_len}")
        room = self.cache.num_blocks * self.cache.block_size
        if length > room or self.cache.can_add(prompt, salt) is paged_attn.Admission.NEVER:
            raise ValueError(f"prompt: {length} tokens with max_tokens, the cache holds {room}")
        if params.n > self.scheduler.max_num_seqs:
            raise ValueError(f"n: expected at most max_num_seqs {self.scheduler.max_num_seqs}, got {params.n}")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: the engine needs a tokenizer for stop strings")

    def cancel(self, request_id: int | str) -> None:
        """End a request: its blocks are free at once, the next step reports it.

        Raises:
            KeyError: no such request.
        """
        for sequence in self.requests[request_id].sequences:
            if sequence.state is not State.FINISHED:
                self._news.append(self._finish(sequence, "cancelled"))

    @property
    def has_work(self) -> bool:
        """Whether a step would do or report something."""
        return bool(self.requests or self._in_flight or self._news)

    # The loop

    @torch.inference_mode()
    def step(self) -> list[Output]:
        """Launch the next step and report new tokens: of this step, or with overlap of the one before it."""
        began = time.perf_counter()
        previous, self._in_flight = self._in_flight, None
        if previous is not None:
            self.scheduler.commit(previous)
        step = self.scheduler.schedule()
        if step is not None:
            step.handle = self.runner.launch(step)
            self._counts.steps += 1
        if self.overlap:
            self._in_flight, finished = step, previous
        else:
            if step is not None:
                self.scheduler.commit(step)
            finished = step
        waiting = time.perf_counter()
        tokens = finished.handle.read() if finished is not None else []
        resumed = time.perf_counter()
        outputs, self._news = self._news, []
        if finished is not None:
            outputs += self._accept(finished, tokens, resumed)
        elif step is None and not outputs and self.scheduler.waiting:
            raise RuntimeError("engine: requests wait and nothing runs; something else holds the cache's blocks")
        self._counts.host_time += waiting - began + time.perf_counter() - resumed
        return outputs

    def _accept(self, step: Step, tokens: list[int], now: float) -> list[Output]:
        """Append each sampled token to its sequence; end those that stop."""
        outputs = []
        for sequence, token in zip(step.samples, tokens):
            sequence.in_flight -= 1
            if sequence.state is State.FINISHED:  # ended while this token was under way
                continue
            sequence.tokens.append(token)
            sequence.token_times.append(now)
            self._counts.generated_tokens += 1
            reason = self._stop_reason(sequence, token)
            if reason is None:
                outputs.append(Output(sequence.request.request_id, sequence.index, [token]))
            else:
                outputs.append(self._finish(sequence, reason, [token]))
        return outputs

    def _stop_reason(self, sequence: Sequence, token: int) -> str | None:
        params = sequence.request.params
        if (token in self.eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids:
            return "stop"
        if params.stop:
            text = self.tokenizer.decode(sequence.generated)
            if any(stop in text for stop in params.stop):
                return "stop"
        return "length" if len(sequence.tokens) - sequence.prompt_len >= params.max_tokens else None

    def _finish(self, sequence: Sequence, reason: str, tokens: Items[int] = ()) -> Output:
        request = sequence.request
        self.scheduler.release(sequence)
        completion = Completion(
            request_id=request.request_id,
            index=sequence.index,
            token_ids=sequence.generated,
            finish_reason=reason,
            cached_tokens=request.sequences[0].cached_prompt,
            preemptions=sequence.preemptions,
            arrival=request.arrival,
            token_times=sequence.token_times,
        )
        if request.finished:
            self._counts.prompt_tokens += len(request.prompt)
            del self.requests[request.request_id]
        return Output(request.request_id, sequence.index, tokens, completion)

    # Conveniences

    def stream(self, prompts: Iterable[Items[int]], params: SamplingParams | None = None) -> Iterator[Output]:
        """Queue the prompts and yield outputs as they come; ``request_id`` counts up in the order of the prompts."""
        prompts = list(prompts)
        self._queue(prompts, [params] * len(prompts))
        while self.has_work:
            yield from self.step()

    def generate(
        self, prompts: Iterable[Items[int]], params: SamplingParams | Items[SamplingParams] | None = None
    ) -> list[Completion]:
        """Run the prompts to their end; completions in the order of the prompts, samples of a prompt together."""
        prompts = list(prompts)
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params: expected {len(prompts)}, one a prompt, got {len(each)}")
        order = {request_id: i for i, request_id in enumerate(self._queue(prompts, each))}
        done = []
        while self.has_work:
            done += [output.completion for output in self.step() if output.completion]
        done = [completion for completion in done if completion.request_id in order]
        return sorted(done, key=lambda completion: (order[completion.request_id], completion.index))

    def _queue(self, prompts: Items[Items[int]], each: Items[SamplingParams | None]) -> list[int | str]:
        """Ids of all the prompts' requests; where one is refused, none stays."""
        request_ids = []
        try:
            for prompt, params in zip(prompts, each):
                request_ids.append(self.add_request(prompt, params))
        except ValueError:
            for request_id in request_ids:
                self.cancel(request_id)
            raise
        return request_ids

    def stats(self) -> EngineStats:
        """Counts so far; the object is updated as the engine runs."""
        self._counts.preemptions = self.scheduler.num_preemptions
        return self._counts


def make_cache(model: torch.nn.Module, num_blocks: int | None = None, **options) -> paged_attn.PagedKVCache:
    """A cache of the model's shape. Without ``num_blocks``: 90% of the free memory of a GPU, or 1 GiB on the CPU."""
    options = {**_cache_shape(model), **options}
    if num_blocks is not None:
        return paged_attn.PagedKVCache(num_blocks=num_blocks, **options)
    return paged_attn.PagedKVCache.from_budget(0.9 if model.device.type == "cuda" else 1 << 30, **options)


def _cache_shape(model: torch.nn.Module) -> dict:
    from paged_attn.integrations.transformers import cache_shape

    return cache_shape(model)


def _trained_length(model: torch.nn.Module) -> int:
    """Longest sequence: what positions exist for; with scaled rotary tables that depend on the length, the unscaled."""
    config = model.config.get_text_config(decoder=True)
    rope = getattr(config, "rope_parameters", None) or {}
    length = getattr(config, "max_position_embeddings", None) or 1 << 20
    if rope.get("rope_type") in ("dynamic", "longrope"):
        return min(length, rope.get("original_max_position_embeddings") or length)
    return length


def _eos(model: torch.nn.Module) -> frozenset[int]:
    eos = getattr(model.generation_config, "eos_token_id", None)
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def _window(model: torch.nn.Module) -> int | None:
    """The sliding window, where all layers have it."""
    config = model.config.get_text_config(decoder=True)
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    return window if kinds is None or all(kind == "sliding_attention" for kind in kinds) else None
