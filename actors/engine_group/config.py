"""The `[engines]` table of a recipe."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from headrace.actors.engine_group.registry import address
from headrace.policies.learners.simulated import SimulatedEnginesConfig


class Placement(StrEnum):
    """Where the engines that the group starts run."""

    LOCAL = "local"
    """On the group's own host."""
    RAY = "ray"
    """Each behind a Ray actor of its own, spread over the hosts of the cluster."""


class SGLangSection(BaseModel):
    """Which SGLang is started."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: Path | None = None
    """Interpreter of the environment that SGLang is installed in; None takes what `scripts/install_sglang` made."""
    arguments: tuple[str, ...] = ()
    """More options of sglang.launch_server; they override those that the other keys here give."""


class EnginesConfig(BaseModel):
    """The inference engines of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: Literal["cpu", "sglang", "simulated"] = "cpu"
    """What `count` engines are: `cpu` is the embedded engine, `sglang` starts SGLang servers, `simulated` takes time
    instead of computing, for the simulated agent and learner."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where they compute. The embedded engine knows the CPU only."""
    simulated: SimulatedEnginesConfig = SimulatedEnginesConfig()
    """Settings of simulated engines."""
    sglang: SGLangSection = SGLangSection()
    """Settings of SGLang servers."""
    count: int = Field(default=2, ge=0)
    """Engines that the group starts; 0 only with `attach` or `router`."""
    placement: Placement = Placement.LOCAL
    """Where those run: `local` on this host, or `ray`, one actor each, spread over the hosts of the cluster."""
    attach: tuple[str, ...] = ()
    """Base URLs of servers that others started (SGLang, or `headrace engine serve`); never killed."""
    router: str | None = None
    """Base URL of an sglang-router: its workers are attached, and followed as they come and go. Turns and pushes go to
    the workers directly."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Devices of one SGLang server."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of SGLang's weights; `auto` takes the model's."""
    cpus: float = Field(default=1.0, ge=0)
    """CPU cores that Ray sets aside for one engine with `placement = "ray"`."""
    max_running: int = Field(default=64, ge=1)
    """Sequences one engine decodes at once."""
    max_context_tokens: int | None = Field(default=None, ge=16)
    """Prompt and answer together; None takes sampling.max_context_tokens."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """From start to the first answer; importing torch takes seconds, a large model minutes."""
    health_timeout_s: float = Field(default=10.0, gt=0)
    """How long an engine may take to tell its load; then it has missed a health check. None counts while a push is
    going on, which has deadlines of its own."""
    health_misses: int = Field(default=3, ge=1)
    """So many health checks missed in a row, and the engine is replaced, or taken out of routing when it is attached.
    An engine whose process is dead is replaced at once."""
    drain_timeout_s: float = Field(default=10.0, gt=0)
    """How long an engine that is removed may finish what it runs; then that goes on elsewhere."""

    @property
    def is_simulated(self) -> bool:
        """No engine, gateway or weights: turns take time."""
        return self.backend == "simulated"

    @property
    def at_least(self) -> int:
        """Engines that are known before the run: those that a router names are not."""
        return max(1, self.count + len(self.attach))

    @field_validator("attach", "router")
    @classmethod
    def _addresses(cls, given: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        for url in (given,) if isinstance(given, str) else given or ():
            check_url(url)
        return given

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for check in (_something_serves, _simulated_alone, _embedded_on_the_cpu, _addresses_differ):
            if (problem := check(self)) is not None:
                raise ValueError(problem)
        return self


def check_url(url: str) -> str:
    """The URL without its last slash. Raises ValueError when it is not `http://host:port`."""
    parts = urlsplit(url)
    try:
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port is not None
    except ValueError:
        named = False
    if not named or parts.path.strip("/"):
        raise ValueError(f"{url} is not the base URL of a server; write http://host:port")
    return url.rstrip("/")


def _something_serves(config: EnginesConfig) -> str | None:
    if config.count or config.attach or config.router:
        return None
    return "engines.count is 0 and nothing is attached: raise it, or name servers in engines.attach or engines.router"


def _simulated_alone(config: EnginesConfig) -> str | None:
    if config.is_simulated and (config.attach or config.router or not config.count):
        return "engines.attach and engines.router are real servers, which engines.backend simulated has not; use cpu"
    return None


def _embedded_on_the_cpu(config: EnginesConfig) -> str | None:
    if config.backend != "cpu" or not config.count:
        return None
    if config.device != "cpu":
        return f"engines.backend cpu, the embedded engine, has no device {config.device}; set backend to sglang"
    if config.tensor_parallel > 1:
        return "engines.tensor_parallel is for SGLang; set engines.backend to sglang, or tensor_parallel to 1"
    if config.dtype != "auto":
        return "engines.dtype is for SGLang: the embedded engine computes in the model's own; leave it auto"
    return None


def _addresses_differ(config: EnginesConfig) -> str | None:
    seen: dict[tuple[str, int], str] = {}
    for url in config.attach:
        if (other := seen.setdefault(address(url), url)) is not url:
            return f"engines.attach: {other} and {url} are one address; name it once"
    return None
