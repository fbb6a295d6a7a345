"""The contract of an inference engine, with SGLang's semantics: ids in; ids, log-probabilities and version spans out.

Invariants:
- `output_ids` and `logprobs` include the matched stop token (or the tokens that complete a stop string): they are
  what was sampled.
- `logprobs` are of the temperature-scaled softmax over the whole vocabulary, not renormalised for top_p or top_k.
- Version spans are the engine's own; nobody stamps them afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NewType, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.buffer.types import VersionSpan
    from headrace.buffer.versions import PolicyVersion

EngineId = NewType("EngineId", str)
RequestId = NewType("RequestId", str)

MAX_TOKEN_CHARACTERS = 256
"""No token of a vocabulary in use is longer: text of more characters than this for each token of a context cannot fit
it, and need not be tokenized to know that."""


class PauseMode(StrEnum):
    """What happens to running requests during a pause."""

    RETRACT = "retract"
    """They keep their tokens and are prefilled again on resume: clean."""
    ABORT = "abort"
    """They return at once with what they have."""
    IN_PLACE = "in_place"
    """They keep their KV cache: the rest is sampled on stale keys and values."""


class FinishReason(StrEnum):
    STOP = "stop"
    """A stop token or stop string."""
    LENGTH = "length"
    """max_new_tokens or the context."""
    ABORT = "abort"
    """Somebody aborted the request; the tokens so far are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """`input_ids` (a tuple, or an array of int32: prompts are long) are validated against the vocabulary before they
    are sent: one bad id kills an SGLang server."""

    request_id: RequestId
    input_ids: Sequence[int]
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    cache_namespace: str | None = None
    """Only prefixes cached under the same name are used again (SGLang's `extra_key`); None shares the common ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """`len(output_ids) == len(logprobs)`; the spans cover it without gaps. `text` drops what was matched as a stop."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    spans: tuple[VersionSpan, ...]
    finish: FinishReason
    text: str
    prompt_tokens: int
    cached_tokens: int
    retractions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """`running` and `waiting` are numbers of requests. `ranks` is how many processes of the engine join a weight group
    (its tensor-parallel size). `update_session`: weights come between begin and end. `version_spans`: a reply tells
    which version sampled which token; without them only a pause that aborts keeps a reply to one version.
    `snapshot_checksums`: its checksums are made as a sender's are, so that the two can be compared."""

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
    """One inference server. Every method has a deadline of its own and raises EngineError (see errors.py)."""

    async def generate(self, request: GenerateRequest) -> Completion: ...

    async def abort(self, request_id: RequestId) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def info(self) -> EngineInfo: ...

    async def aclose(self) -> None: ...
