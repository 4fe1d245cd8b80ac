"""What is asked of the engine and what comes back."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    Args:
        max_tokens: most tokens to generate.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it and sampled.
        top_k: sample among the k likeliest tokens; 0: all.
        top_p: sample among the likeliest tokens that together have this probability.
        n: samples of this prompt; they share its blocks.
        seed: of the noise; sample i uses ``seed + i``. The same seed gives the same tokens, whatever else runs.
        stop_token_ids: end after one of these, besides the model's end-of-sequence tokens.
        stop: end when one of these strings appears in the text; needs the engine's tokenizer.
        ignore_eos: go on past the model's end-of-sequence tokens.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    n: int = 1
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        for name, ok, need in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0.0, "0 or more"),
            ("top_k", 0 <= self.top_k < 2**63, "0 or more, in 64 bits"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("n", self.n >= 1, "at least 1"),
            ("seed", -(2**63) <= self.seed <= 2**63 - self.n, "seeds of 64 bits for n samples"),
            ("stop_token_ids", not isinstance(self.stop_token_ids, int), "a tuple of token ids"),
            ("stop", not isinstance(self.stop, str) and "" not in self.stop, "a tuple of strings that are not empty"),
        ):
            if not ok:
                raise ValueError(f"{name}: expected {need}, got {getattr(self, name)!r}")


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """One prompt and its samples."""

    request_id: int | str
    prompt: list[int]
    params: SamplingParams
    salt: str | None = None
    arrival: float = field(default_factory=time.perf_counter)
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(sequence.state is State.FINISHED for sequence in self.sequences)


@dataclass(eq=False)
class Sequence:
    """One sample: the prompt's tokens and those generated so far.

    ``computed`` counts the tokens whose keys and values are in the cache or on their way there; ``in_flight`` (0 or 1)
    the sampled tokens that the host has not read yet. A row of the next step runs tokens ``computed .. total``.
    """

    seq_id: int
    request: Request
    index: int
    tokens: list[int]
    state: State = State.WAITING
    computed: int = 0
    in_flight: int = 0
    slot: int = -1
    cached_prompt: int = 0
    preemptions: int = 0
    token_times: list[float] = field(default_factory=list)

    def __post_init__(self):
        self.prompt_len = len(self.request.prompt)

    @property
    def total(self) -> int:
        return len(self.tokens) + self.in_flight

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def exhausted(self) -> bool:
        """All tokens it may generate are sampled, read or not."""
        return len(self.tokens) + self.in_flight - self.prompt_len >= self.request.params.max_tokens


@dataclass(frozen=True)
class Completion:
    """One finished sample.

    ``finish_reason``: "length" (``max_tokens``), "stop" (a stop token or string) or "cancelled". ``cached_tokens``:
    leading prompt tokens found in the prefix cache. ``arrival`` and ``token_times`` are in seconds of
    ``time.perf_counter``.
    """

    request_id: int | str
    index: int
    token_ids: list[int]
    finish_reason: str
    cached_tokens: int
    preemptions: int
    arrival: float
    token_times: list[float]


class Output(NamedTuple):
    """News of one sample: tokens generated since its last output, and the whole when it has ended."""

    request_id: int | str
    index: int
    token_ids: Tokens[int]
    completion: Completion | None = None
