"""The config sections `services.NAME`: services that environments and evaluators call, one table for each.

Invariant: a table says completely where its service is; no other section or variable changes that.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, field_validator, model_validator

from headrace.buffer.primitives.sections import Section

ServiceName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]+$")]
"""Name of a service, which is also the stem of its files in the run directory."""


class ServiceKind(StrEnum):
    """Kind of a service."""

    RETRIEVER = "retriever"
    """Finds passages for queries: `POST URL/retrieve`."""
    MODEL = "model"
    """A model other than the policy: `POST URL/v1/chat/completions`."""
    REWARD = "reward"
    """Scores rollouts, for the evaluator `http`: `POST URL`."""


class RetrySection(Section):
    """Table [services.NAME.retry] of a recipe."""

    attempts: int = Field(default=4, ge=1)
    """Maximum number of requests for one call. Only refused connections, timeouts, the statuses 408, 429 and 5xx, and
    answers that cannot be read are tried again."""
    total_s: float = Field(default=45.0, gt=0)
    """Time limit for all requests of one call and the waits between them, in seconds; must be below
    `rollout.agent_timeout_s`, so that an outage is not taken for an agent that used up its time."""


class PriceSection(Section):
    """Table [services.NAME.price] of a recipe: prices in any one currency, for the costs in the report."""

    prompt_1k: float = Field(default=0.0, ge=0)
    """Price of 1,000 prompt tokens, as counted by the service."""
    completion_1k: float = Field(default=0.0, ge=0)
    """Price of 1,000 completion tokens."""
    request: float = Field(default=0.0, ge=0)
    """Price of an answered request."""


class HelperEngineSection(Section):
    """Table [services.NAME.engine] of a recipe: the engine that a run starts for a helper model, on CPUs."""

    backend: Literal["cpu", "sglang"] = "cpu"
    """Server of the model: `cpu`, the embedded engine for small models, or `sglang`. For a GPU, run `headrace serve
    model` yourself and set `url`."""
    dtype: str = "auto"
    """For sglang: data type of the weights."""
    python: Path | None = None
    """For sglang: Python interpreter of another environment to run it in."""
    max_context: int | None = Field(default=None, ge=2)
    """Maximum number of tokens in prompt and output together; None: the engine's default."""


class ServiceConfig(Section):
    """Table [services.NAME] of a recipe."""

    kind: ServiceKind | str = Field(default=ServiceKind.RETRIEVER, union_mode="left_to_right")
    """Kind of the service: `retriever`, `model` (any server of OpenAI's Chat Completions API), `reward` (a server that
    scores rollouts), or a class of another package as package.module:Class (guide 'Services')."""
    url: str = ""
    """Base URL of a running service, such as http://127.0.0.1:8000; for `reward`, the URL that requests go to."""
    corpus: Path | None = None
    """For retrievers: JSONL file of passages, relative to the recipe. The run starts a retriever of its own for it, in
    place of `url`."""
    path: Path | None = None
    """For models: model directory, relative to the recipe. The run starts an engine of its own for it, in place of
    `url`; it gets neither weights nor requests of the policy."""
    engine: HelperEngineSection = HelperEngineSection()
    """Engine for `path`."""
    model: str = ""
    """For models: name of the model in requests."""
    key_file: Path | None = None
    """Private file with the key that requests carry as `Authorization: Bearer KEY`, relative to the recipe; on a
    cluster also `secret:NAME` (guide 'Control API of a cluster')."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Time limit for one request, in seconds."""
    max_concurrency: int = Field(default=64, ge=1)
    """Maximum number of calls of one worker at once. The limit falls below it while the service is overloaded."""
    retry: RetrySection = RetrySection()
    """Limits of the retries."""
    price: PriceSection = PriceSection()
    """Prices for the costs in the report."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for a class of another package."""

    @property
    def is_started(self) -> bool:
        """True if the run starts the service itself."""
        return self.corpus is not None or self.path is not None

    @property
    def is_outside(self) -> bool:
        """True for a class of another package."""
        return not isinstance(self.kind, ServiceKind)

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        if not url:
            return url
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:
            valid = False
        if not valid:
            raise ValueError(f"{url} is not an http or https URL; write one such as http://127.0.0.1:8000")
        return url.rstrip("/")

    @model_validator(mode="after")
    def _fits_its_kind(self) -> Self:
        if self.is_outside:
            given = [key for key in ("url", "corpus", "path", "model", "key_file") if getattr(self, key)]
            if given:
                raise ValueError(f"kind {self.kind} takes settings only; move {given[0]} into settings")
            return self
        if self.settings:
            raise ValueError(f"settings are for classes of other packages, not for kind {self.kind}; remove them")
        if self.path is None and self.engine != HelperEngineSection():
            raise ValueError("engine has no effect without path; remove it, or set path to a model directory")
        if self.kind != ServiceKind.MODEL and self.path is not None:
            raise ValueError('path is for models; set kind = "model", or remove it')
        if self.kind != ServiceKind.RETRIEVER and self.corpus is not None:
            raise ValueError('corpus is for retrievers; set kind = "retriever", or remove it')
        if self.kind == ServiceKind.MODEL:
            if self.url and self.path is not None:
                raise ValueError("url and path are both set; keep url for a running server, or path for a model")
            if not self.url and self.path is None:
                raise ValueError("url and path are missing; set url to a running server, or path to a model directory")
        elif self.kind == ServiceKind.REWARD:
            if not self.url:
                raise ValueError("url is missing; set the URL of a running server")
        elif bool(self.url) == (self.corpus is not None):
            if self.url:
                raise ValueError("url and corpus are both set; keep url for a running retriever, or corpus for a file")
            raise ValueError("url and corpus are missing; set url to a running retriever, or corpus to a JSONL file")
        return self
