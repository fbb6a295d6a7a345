"""Interface of an inference engine with SGLang's semantics: it receives token ids, and returns token ids,
log-probabilities and version spans.

Invariants:
- `output_ids` and `logprobs` include the matched stop token (or the tokens that complete a stop string), as sampled.
- `logprobs` are of the temperature-scaled softmax over the whole vocabulary, not renormalised for top_p or top_k.
  With a grammar, they are renormalised over the tokens that it allows.
- Version spans come from the engine itself, and are not added afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType, Protocol

from headrace.buffer.trajectories.types import VersionSpan
from headrace.buffer.trajectories.versions import PolicyVersion

EngineId = NewType("EngineId", str)
RequestId = NewType("RequestId", str)

MAX_TOKEN_CHARACTERS = 256
"""Upper bound on a token's length, in characters, in all vocabularies in use. A text longer than this times the number
of tokens in a context does not fit and need not be tokenized."""


MAX_GRAMMAR_CHARACTERS = 262_144
"""Longest JSON document of a grammar. Compiling one of this size takes about a second."""


class PauseMode(StrEnum):
    """Treatment of running requests during a pause."""

    RETRACT = "retract"
    """Requests keep their tokens and are prefilled again on resume."""
    ABORT = "abort"
    """Requests return at once with the tokens so far."""
    IN_PLACE = "in_place"
    """Requests keep their KV cache: their remaining tokens are sampled with stale keys and values."""


class FinishReason(StrEnum):
    """Reason why a generation ended."""

    STOP = "stop"
    """A stop token or stop string was sampled."""
    LENGTH = "length"
    """The max_new_tokens limit or the context length was reached."""
    ABORT = "abort"
    """The request was aborted; the tokens so far are kept."""


class GrammarKind(StrEnum):
    """Language of a grammar, named after the sampling parameter of SGLang that takes it."""

    JSON_SCHEMA = "json_schema"
    """A JSON schema: the whole output is a value that fits it."""
    STRUCTURAL_TAG = "structural_tag"
    """A structural tag of XGrammar: tags, texts and JSON values in sequence or as alternatives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grammar:
    """Form of an output, which ends with a stop token when it is complete. `text` is a JSON document."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """Request for one completion. `input_ids` (a tuple, or an array of int32 for long prompts) are checked against the
    vocabulary before they are sent, because an invalid id would kill an SGLang server."""

    request_id: RequestId
    input_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    cache_namespace: str | None = None
    """Only prefixes cached under the same name are reused (SGLang's `extra_key`); None reuses prefixes that were cached
    without a name."""
    grammar: Grammar | None = None
    """Tokens outside the grammar are not sampled; None allows all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Sampled completion. `output_ids` and `logprobs` have equal lengths, and the spans cover them without gaps. `text`
    omits the matched stop. `queue_s` and `prefill_s` are the seconds in the engine's queue and from there to the first
    token, and `total_s` those from the request's arrival at the engine to its answer, all by the engine's clock; None
    if it does not report them."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: FinishReason
    text: str
    prompt_tokens: int
    cached_tokens: int
    retractions: int
    queue_s: float | None = None
    prefill_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """State and features of an engine. `running` and `waiting` are numbers of requests. `ranks` is the number of its
    processes that join a weight group (its tensor-parallel size). `update_session`: weights are sent between the
    beginning and the end of an update session. `version_spans`: a reply reports the version of each token; without
    this, only a pause that aborts ensures that a reply has a single version. `snapshot_checksums`: the engine computes
    checksums in the same way as a sender, so that the two can be compared."""

    server_version: str
    version: PolicyVersion
    running: int
    waiting: int
    max_context_tokens: int
    paused: bool
    model_path: str = ""
    ranks: int = 1
    update_session: bool = True
    version_spans: bool = True
    snapshot_checksums: bool = False


class Engine(Protocol):
    """Interface of one inference server. Every method has a deadline and raises EngineError (see errors.py)."""

    async def generate(self, request: GenerateRequest) -> Completion: ...

    async def abort(self, request_id: RequestId) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def info(self) -> EngineInfo: ...

    async def aclose(self) -> None: ...
