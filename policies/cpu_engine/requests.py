"""Parses /generate bodies with SGLang's keys, defaults and errors. Pure: no clock, no I/O, no torch.

Invariants:
- A parsed request can be run: its ids are in the vocabulary, prompt and output fit in the context, and its sampling
  parameters are finite.
- An SGLang key that this engine does not support is refused with a clear message, never ignored. As in SGLang, unknown
  keys at the top level are ignored and unknown sampling keys refused.
- `extra_key`, which names a part of SGLang's prefix cache, is accepted and has no effect: nothing is cached between
  requests, so every prefix is computed with the current weights.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.policies.engine import MAX_TOKEN_CHARACTERS, GrammarKind
from headrace.policies.errors import RequestInvalid

GREEDY_BELOW = 1e-6
MAX_SEQUENCES = 4096
"""Maximum number of sequences in one body, counting each sample of a prompt."""
UNSUPPORTED_SAMPLING: Mapping[str, object] = {
    "stop_regex": None,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "regex": None,
    "ebnf": None,
    "logit_bias": None,
    "custom_params": None,
    "beam_width": None,
    "watermark": None,
    "choice": None,
}
IGNORED_SAMPLING = frozenset({"spaces_between_special_tokens", "stream_interval"})
UNSUPPORTED_TOP: Mapping[str, object] = {
    "input_embeds": None,
    "stream": False,
    "top_logprobs_num": 0,
    "token_ids_logprob": None,
    "return_sampling_mask": False,
    "return_hidden_states": False,
    "lora_path": None,
}


class SamplingParams(BaseModel):
    """Sampling parameters that this engine supports, with SGLang's names and defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_new_tokens: int = Field(default=128, ge=0)
    """Maximum number of output tokens; 0 samples nothing."""
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Divisor of the logits; 0 is greedy and reports raw log-probabilities."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Probability mass of the nucleus."""
    top_k: int = Field(default=-1, ge=-1)
    """Number of most likely tokens to sample from; -1 disables the limit."""
    stop: str | list[str] | None = None
    """Strings that end the output when its text contains one of them."""
    stop_token_ids: list[int] | None = None
    """Ids that end the output, in addition to the model's own."""
    ignore_eos: bool = False
    """Do not end the output at any stop id, including the model's own."""
    no_stop_trim: bool = False
    """Include the matched stop string or token in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    sampling_seed: int | None = None
    """Seed of a separate random stream for this request."""
    json_schema: str | None = None
    """JSON schema that the output must fit."""
    structural_tag: str | None = None
    """Structural tag of XGrammar, as a JSON document, that the output must follow."""
    n: int = Field(default=1, ge=1, le=64)
    """Number of samples of each prompt."""

    def stop_strings(self) -> tuple[str, ...]:
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return tuple(text for text in given if text)

    @property
    def grammar(self) -> tuple[GrammarKind, str] | None:
        """Kind and JSON document of the grammar; None if there is none."""
        return next(((kind, text) for kind in GrammarKind if (text := getattr(self, kind.value))), None)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    """Limits of the model, in tokens."""

    vocab_size: int
    context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Sequence of tokens to continue."""

    request_id: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    return_logprob: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedBody:
    """Parsed /generate body. `listed` is True if the reply is a list (a batch, or n > 1)."""

    prompts: tuple[Prompt, ...]
    listed: bool


def parse_generate(body: object, limits: ModelLimits, encode: Callable[[str], list[int]]) -> ParsedBody:
    """Parse a /generate body. Raises RequestInvalid with the message of the 400 reply."""
    if not isinstance(body, dict):
        raise RequestInvalid("the body must be one JSON object")
    refuse_unsupported(body, UNSUPPORTED_TOP, "")
    if body.get("logprob_start_len") not in (None, -1):
        raise RequestInvalid(
            "logprob_start_len other than -1 is not supported: this engine returns output logprobs only"
        )
    inputs, batched = read_inputs(body, limits, encode)
    samplings = read_samplings(body.get("sampling_params"), len(inputs))
    logprobs = read_flags(body.get("return_logprob", False), len(inputs))
    names = read_request_ids(body.get("rid"), len(inputs), batched)
    sequences = sum(sampling.n for sampling in samplings)
    if sequences > MAX_SEQUENCES:
        raise RequestInvalid(
            f"{sequences} sequences in one request, but at most {MAX_SEQUENCES} are allowed: send several requests"
        )
    prompts = []
    for ids, sampling, wanted, name in zip(inputs, samplings, logprobs, names, strict=True):
        check_ids(ids, sampling, limits)
        copies = [name] if sampling.n == 1 else [f"{name}_{index}" for index in range(sampling.n)]
        prompts += [
            Prompt(request_id=copy, input_ids=tuple(ids), sampling=sampling, return_logprob=wanted) for copy in copies
        ]
    return ParsedBody(prompts=tuple(prompts), listed=batched or len(prompts) > 1)


def refuse_unsupported(given: Mapping[str, Any], defaults: Mapping[str, object], prefix: str) -> None:
    for key, default in defaults.items():
        if given.get(key, default) not in (default, None):
            raise RequestInvalid(f"{prefix}{key} is not supported by this engine; leave it out")


def read_inputs(
    body: Mapping[str, Any], limits: ModelLimits, encode: Callable[[str], list[int]]
) -> tuple[list[list[int]], bool]:
    """Return the lists of ids, and whether they are a batch."""
    text, ids = body.get("text"), body.get("input_ids")
    check_sizes(text, ids, limits)
    if (text is None) == (ids is None):
        raise RequestInvalid("Either text or input_ids should be provided, and not both.")
    if isinstance(text, str):
        return [encode(text)], False
    if isinstance(text, list) and text and all(isinstance(item, str) for item in text):
        return [encode(item) for item in text], True
    if isinstance(ids, list) and ids and all(isinstance(item, list) for item in ids):
        return ids, True
    if isinstance(ids, list):
        return [ids], False
    raise RequestInvalid("text must be a string or strings, input_ids a list of integers or a list of such lists")


def check_sizes(text: object, ids: object, limits: ModelLimits) -> None:
    """Refuse oversized inputs based on their length alone, because parsing them would delay other requests."""
    most = max(MAX_SEQUENCES, limits.context_tokens)
    if any(isinstance(items, list) and len(items) > most for items in (text, ids)):
        raise RequestInvalid(
            f"more than {most} entries: longer than the model's context length, or too many prompts in one request"
        )
    longest = limits.context_tokens * MAX_TOKEN_CHARACTERS
    texts = text if isinstance(text, list) else [text]
    if sum(len(item) for item in texts if isinstance(item, str)) > longest:
        raise RequestInvalid(f"text has more than {longest} characters: too many for this model's context length")


def read_samplings(given: object, count: int) -> list[SamplingParams]:
    if isinstance(given, list):
        if len(given) != count:
            raise RequestInvalid(f"sampling_params has {len(given)} entries for {count} prompts")
        return [read_sampling(item) for item in given]
    return [read_sampling(given)] * count


def read_sampling(given: object) -> SamplingParams:
    if given is None:
        return SamplingParams()
    if not isinstance(given, dict):
        raise RequestInvalid("sampling_params must be a JSON object")
    known = [*SamplingParams.model_fields, *UNSUPPORTED_SAMPLING, *IGNORED_SAMPLING]
    unknown = sorted(map(str, given.keys() - set(known)))
    if unknown:
        raise RequestInvalid(f"Unexpected sampling_params keys {unknown}; valid keys are {sorted(known)}")
    refuse_unsupported(given, UNSUPPORTED_SAMPLING, "sampling_params.")
    kept = {key: value for key, value in given.items() if key in SamplingParams.model_fields and value is not None}
    try:
        sampling = SamplingParams.model_validate(kept)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise RequestInvalid(f"sampling_params.{key}: {first['msg']}, got {str(first['input'])[:100]}") from error
    if sampling.top_k == 0:
        raise RequestInvalid("top_k must be -1 (disable) or at least 1, got 0.")
    if sampling.json_schema and sampling.structural_tag:
        raise RequestInvalid("Only one of json_schema or structural_tag can be set.")
    if sampling.grammar is not None and sampling.ignore_eos:
        raise RequestInvalid("ignore_eos: an output with a grammar ends when it is complete; leave it out")
    if sampling.sampling_seed is not None and not 0 <= sampling.sampling_seed < 2**63:
        raise RequestInvalid("sampling_seed must be between 0 and 2**63 - 1")
    return sampling


def read_flags(given: object, count: int) -> list[bool]:
    if given is None or isinstance(given, bool):
        return [bool(given)] * count
    if isinstance(given, list) and len(given) == count and all(isinstance(flag, bool) for flag in given):
        return given
    raise RequestInvalid("return_logprob must be a boolean, or one boolean for each prompt")


def read_request_ids(given: object, count: int, batched: bool) -> list[str]:
    """Return the request ids, named as SGLang does: the rid `bat` of a batch becomes `bat_0`, `bat_1`."""
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(given, str) and given:
        return [f"{given}_{index}" for index in range(count)] if batched else [given]
    if isinstance(given, list) and len(given) == count and all(isinstance(name, str) and name for name in given):
        if len(set(given)) == count:
            return given
        raise RequestInvalid("Duplicate request IDs detected within the request: rid must be unique")
    raise RequestInvalid("rid must be a non-empty string, or one such string for each prompt")


def check_ids(ids: list[Any], sampling: SamplingParams, limits: ModelLimits) -> None:
    if not ids:
        raise RequestInvalid("input_ids cannot be empty.")
    if len(ids) >= limits.context_tokens:
        raise RequestInvalid(
            f"The input ({len(ids)} tokens) is longer than the model's context length ({limits.context_tokens} tokens)."
        )
    wrong = next((item for item in ids if type(item) is not int or not 0 <= item < limits.vocab_size), None)
    if wrong is not None or None in ids:
        raise RequestInvalid(f"input_ids contains {str(wrong)[:100]}; valid ids are [0, {limits.vocab_size})")
    total = len(ids) + sampling.max_new_tokens
    if total > limits.context_tokens:
        raise RequestInvalid(
            f"Requested token count exceeds the model's maximum context length of {limits.context_tokens} tokens. "
            f"You requested a total of {total} tokens: {len(ids)} tokens from the input messages and "
            f"{sampling.max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input "
            "messages or the completion to fit within the limit."
        )


class InitGroup(BaseModel):
    """Body of /init_weights_update_group."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    master_address: str
    """Host of rank 0's store."""
    master_port: int = Field(gt=0, lt=65536)
    """Port of rank 0's store."""
    rank_offset: int = Field(gt=0, lt=65536)
    """Rank of this engine, which is a single process."""
    world_size: int = Field(gt=1, le=65536)
    """Number of ranks in the group."""
    group_name: str = "weight_update_group"
    """Name of the group, and prefix of its keys in the store."""
    backend: str = "nccl"
    """Backend of the group; this engine supports gloo only."""


class UpdateWeights(BaseModel):
    """Body of /update_weights_from_distributed."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    names: tuple[str, ...] = Field(min_length=1)
    """Hugging Face parameter names."""
    dtypes: tuple[str, ...]
    """Torch dtype names."""
    shapes: tuple[tuple[int, ...], ...]
    """One shape for each name."""
    group_name: str = "weight_update_group"
    """Group from which the weights are received."""
    flush_cache: bool = True
    """Refused while requests are running. There is nothing to flush: this engine caches nothing between requests."""
    abort_all_requests: bool = False
    """Abort all waiting requests."""
    weight_version: str | None = None
    """Label of the weights after the swap."""
    load_format: str | None = None
    """None for one broadcast per tensor, `flattened_bucket` for one broadcast of all tensors."""


class UpdateFromDisk(BaseModel):
    """Body of /update_weights_from_disk."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_path: str = Field(min_length=1)
    """Directory with config.json and model.safetensors of the same model."""
    flush_cache: bool = True
    """Refused while requests are running, as in UpdateWeights."""
    abort_all_requests: bool = False
    """Abort all requests first."""
    weight_version: str | None = None
    """Label of the weights after the swap; None keeps the current one."""


class UpdateVersion(BaseModel):
    """Body of /update_weight_version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    new_version: str
    """New label of the current weights."""
    abort_all_requests: bool = True
    """Abort all requests first, as SGLang does by default."""
