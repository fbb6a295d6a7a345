"""A recipe's document as the rules see it, and how much of a model fits into the memory it names.

Memory is estimated as docs/scaling.md does: model states first, then rows of the learner and caches of the engines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final

from pydantic import BaseModel, TypeAdapter

from headrace.actors.derivation.host import Host, gigabytes, this_host
from headrace.policies.learners.objectives.config import PPO
from headrace.policies.models.facts import ModelFacts

USED_RAM: Final = 0.75
"""Share of a host's memory for learner and engines; sandboxes, Ray and caches of files take the rest."""
USED_GPU, ENGINE_GPU = 0.9, 0.85
"""The same of a GPU that trains, and of one that serves, which SGLang decides."""
_GPU_BYTES: Final = 80_000_000_000
OFFLOAD: Final = "--optimizer-cpu-offload"
"""Flag of Megatron with which the optimizer's states are in the host's memory."""
_LAYER: Final = 17
"""Values for each token and channel that a layer keeps for the backward pass (arXiv 2205.05198, equation 2, without
attention scores, which are never stored)."""


@cache
def _field(shape: type[BaseModel], key: str) -> tuple[TypeAdapter[Any], Any]:
    """Return what validates a key's value, and its default."""
    first, _, rest = key.partition(".")
    field = shape.model_fields[first]
    if rest:
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel), key
        return _field(field.annotation, rest)
    annotation: Any = Annotated[field.annotation, *field.metadata, None]
    return TypeAdapter(annotation), field.get_default(call_default_factory=True)


class Terms:
    """Keys of a document by their dotted names, with the defaults of `shape` where they are unset, and the facts of the
    model, None if it is not here, and of the host. Values of a wrong type raise ValidationError."""

    def __init__(self, document: dict[str, Any], shape: type[BaseModel], model: ModelFacts | None, host: Host) -> None:
        self.document, self.model, self.host, self._shape = document, model, host, shape
        self.longest = 0
        """Tokens of the longest context of the run's sources."""

    @classmethod
    def of(cls, config: BaseModel, model: ModelFacts | None = None) -> Terms:
        """Return the terms of a complete configuration."""
        return cls(config.model_dump(), type(config), model, this_host())

    def is_set(self, key: str) -> bool:
        """Return whether a key has a value, or could have none because what is above it is not a table."""
        table = self._table(key)
        return table is None or key.rpartition(".")[2] in table

    def set(self, key: str, value: Any) -> None:
        table = self.document
        for part in key.split(".")[:-1]:
            table = table.setdefault(part, {})
        table[key.rpartition(".")[2]] = value

    def __getitem__(self, key: str) -> Any:
        (known, default), table, name = _field(self._shape, key), self._table(key), key.rpartition(".")[2]
        return known.validate_python(table[name]) if table and name in table else default

    def _table(self, key: str) -> Mapping[str, Any] | None:
        table: Any = self.document
        for part in key.split(".")[:-1]:
            table = table.get(part, {}) if isinstance(table, dict) else None
        return table if isinstance(table, dict) else None

    @property
    def size(self) -> int:
        """Number of parameters; 0 without a model."""
        return self.model.parameters if self.model else 0

    @property
    def trains_here(self) -> bool:
        return bool(self["learner.kind"] == "megatron")

    @property
    def free_gpus(self) -> int:
        """GPUs of this host that the learner leaves."""
        claimed = self["learner.ranks"] if self.trains_here and self["learner.device"] == "cuda" else 0
        return len(self.host.gpus) - claimed

    @property
    def gpu_bytes(self) -> int:
        """Memory of one GPU: what the machine file says, else the least of this host's, else 80 GB."""
        return int(self["engines.gpu_memory_bytes"] or min(self.host.gpus, default=_GPU_BYTES))

    @property
    def learner_bytes(self) -> int:
        """Bytes that a rank of the Megatron learner holds for one parameter; PPO's critic is a second model."""
        half, models = self["learner.dtype"] == "bfloat16", 2 if self["learner.objective"] == PPO else 1
        return models * (18 if half else 16) + (2 if half else 4) * bool(self["learner.kl_coef"])

    def on_cpu(self) -> dict[str, int]:
        """Return the bytes for one parameter that each part holds in this host's memory. The embedded engine has two
        sets of weights in float32, SGLang has one in 16 bits."""
        on_cpu = self.trains_here and self["learner.device"] == "cpu"
        serves = {"cpu": 8, "sglang": 2}.get(self["engines.backend"], 0) if self["engines.device"] == "cpu" else 0
        return {
            "learner": self.learner_bytes * self["learner.ranks"] if on_cpu else 0,
            "engines": serves * self["engines.count"],
        }

    def _left(self, part: str) -> float:
        """Return what model states leave of this host's memory for a part's rows or caches: an equal share."""
        held = self.on_cpu()
        left = USED_RAM * self.host.memory_bytes - self.size * sum(held.values())
        return left / (2 if held["learner"] and held["engines"] else 1) if held[part] else math.inf

    def micro_batch(self) -> tuple[float, str]:
        """Return how many tokens of a micro-batch fit into the learner's memory, and that memory."""
        model, of_gpu = self.model, f"{gigabytes(self.gpu_bytes)} GB of GPU memory"
        if model is None or self["learner.kind"] not in ("megatron", "slime"):
            return math.inf, ""
        if not self.trains_here:
            return self._slime_tokens(model), of_gpu
        width = model.hidden * (2 if self["learner.dtype"] == "bfloat16" else 4)
        token = width * (model.layers + _LAYER if self["learner.recompute"] else model.layers * _LAYER)
        if self["learner.device"] == "cuda":
            return (USED_GPU * self.gpu_bytes - self.size * self.learner_bytes) / token, of_gpu
        return self._left("learner") / self["learner.ranks"] / token, self.host_memory

    def _slime_tokens(self, model: ModelFacts) -> float:
        """Weights in bf16, gradients and optimizer in fp32, divided as slime does. The optimizer may be in the host's
        memory."""
        nodes, each = self["learner.slime.nodes"], self["learner.slime.gpus_per_node"]
        parts = ("tensor", "pipeline", "context", "expert")
        tensor, pipeline, context, expert = (self[f"learner.slime.{part}_parallel"] for part in parts)
        dense, experts = (model.parameters - model.experts) / tensor, model.experts / expert
        copied = (dense * tensor + experts * expert) * pipeline / (nodes * each)
        states = 0 if OFFLOAD in self["learner.slime.arguments"] else 12
        held = (6 * (dense + experts) + states * copied) / pipeline
        token = (2 * model.hidden * (model.layers / pipeline + _LAYER) + 12 * model.vocabulary) / tensor
        return float(context * (USED_GPU * self.gpu_bytes - held) / token)

    def cache(self) -> tuple[float, str]:
        """Return how many tokens the cache of one engine holds, and the memory that it is in."""
        model, size = self.model, self["engines.tensor_parallel"]
        if model is None or self["engines.backend"] == "simulated" or not self["engines.count"]:
            return math.inf, ""
        if self["engines.device"] == "cuda":
            left = ENGINE_GPU * self.gpu_bytes - self.size * 2 / size
            return left / (model.cache_values * 2 / size), f"{gigabytes(self.gpu_bytes)} GB of the engines' GPUs"
        left = self._left("engines") / self["engines.count"]
        return left / (model.cache_values * 4), self.host_memory

    @property
    def host_memory(self) -> str:
        return f"{gigabytes(self.host.memory_bytes)} GB of memory"
