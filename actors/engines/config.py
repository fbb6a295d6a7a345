"""Config section `[engines]` of a recipe."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from headrace.actors.engines.registry import address
from headrace.buffer.primitives.sections import Section
from headrace.policies.learners.simulated import SimulatedEnginesConfig
from headrace.policies.sglang.server import OWN_ENVIRONMENT, OWN_OPTIONS, PASSED_PREFIXES

DEVICE_OPTIONS: Final = {
    **dict.fromkeys(("--tp-size", "--tp", "--tensor-parallel-size"), "engines.tensor_parallel"),
    **dict.fromkeys(
        ("--dp-size", "--dp", "--data-parallel-size", "--attn-dp-size", "--enable-dp-attention"),
        "engines.data_parallel",
    ),
    **dict.fromkeys(("--ep-size", "--ep", "--expert-parallel-size"), "engines.expert_parallel"),
    **dict.fromkeys(("--pp-size", "--pipeline-parallel-size"), "engines.tensor_parallel"),
    **dict.fromkeys(("--nnodes", "--node-rank", "--dist-init-addr"), "engines.nodes"),
    **dict.fromkeys(("--base-gpu-id", "--gpu-id-step", "--device"), "engines.device"),
}
"""Options of SGLang that select devices, and the key to set instead."""


class Placement(StrEnum):
    """Placement of the engines that the group starts."""

    LOCAL = "local"
    """On the group's own host."""
    RAY = "ray"
    """Each in its own Ray actor, spread over the hosts of the cluster."""


class SGLangSection(Section):
    """Installation and options of SGLang servers that the group starts."""

    python: Path | None = None
    """Interpreter of an environment with SGLang; None uses the installed one (guide 'SGLang')."""
    report_times: bool = True
    """Start servers with `--enable-metrics`, so that replies report the time in the queue and to the first token, which
    `headrace trace` then tells apart. The servers also answer /metrics, without a key."""
    traces: bool = False
    """Start servers with `--enable-trace`, so that the spans of their requests (queue, prefill, decode) become part of
    the rollouts' traces. SGLang's environment needs OpenTelemetry's SDK and OTLP exporters for it."""
    arguments: tuple[str, ...] = ()
    """Additional options of sglang.launch_server; they override options that follow from other keys."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the servers: SGLANG_*, FLASHINFER_*, TORCHINDUCTOR_*, TRITON_*, NCCL_* and GLOO_*. The
    last two are also taken from headrace's own environment, which these override."""

    @field_validator("environment")
    @classmethod
    def _is_sglang_s(cls, given: dict[str, str]) -> dict[str, str]:
        for name in given:
            if not name.startswith(PASSED_PREFIXES):
                raise ValueError(f"{name} is not one of {', '.join(f'{one}*' for one in PASSED_PREFIXES)}; remove it")
            if name in OWN_ENVIRONMENT:
                raise ValueError(f"{name} is set by headrace, whose health checks and clients rely on it; remove it")
        return given


class EnginesConfig(Section):
    """Config of a run's inference engines."""

    backend: Literal["cpu", "sglang", "simulated"] = "cpu"
    """Kind of the `count` engines: `cpu` is the embedded engine, `sglang` starts SGLang servers, `simulated` only takes
    the time that engines would take, for use with the simulated agent and learner."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the engines. The embedded engine supports only the CPU. With `cuda`, each engine that the group starts
    has `tensor_parallel` GPUs of its own, which are reserved with Ray."""
    simulated: SimulatedEnginesConfig = SimulatedEnginesConfig()
    """Settings of simulated engines."""
    sglang: SGLangSection = SGLangSection()
    """Settings of SGLang servers."""
    count: int = Field(default=2, ge=0)
    """Number of engines that the group starts; 0 requires `attach` or `router`."""
    placement: Placement = Placement.LOCAL
    """Placement of the engines that the group starts: `local` on this host, or `ray`, one actor each, spread over the
    cluster's hosts."""
    attach: tuple[str, ...] = ()
    """Base URLs of running servers (SGLang, or `headrace serve engine`) to attach; they are never killed."""
    router: str | None = None
    """Base URL of an sglang-router, whose workers are attached and removed as its list changes. Turns and pushes go to
    the workers directly."""
    key_file: Path | None = None
    """Private file (mode 600) with the key of the attached servers and of the router; None for servers without one. The
    engines that the group starts have a key of their own, which the run makes."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of devices that one SGLang server uses."""
    nodes: int = Field(default=1, ge=1)
    """Number of hosts among which one server's devices are divided; it divides `tensor_parallel`, and more than 1 needs
    `placement = "ray"`. The first of them answers requests, and the server ends when one of them is lost."""
    data_parallel: int = Field(default=1, ge=1)
    """Number of groups into which a server's devices are divided for attention (SGLang's `enable_dp_attention`), each
    with requests and caches of its own; it divides `tensor_parallel`. Replicas of a whole model are engines (`count`),
    because a server with several takes no new weights."""
    expert_parallel: int = Field(default=1, ge=1)
    """Number of devices among which one server divides the experts of a layer; it divides `tensor_parallel`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of SGLang's weights; `auto` uses the model's."""
    gpu_memory_bytes: int | None = Field(default=None, ge=1 << 30)
    """Memory of each GPU that learner and engines use, from which other keys are derived; None means that of this
    host's GPUs, or 80 GB where there are none."""
    cpus: float = Field(default=1.0, ge=0)
    """CPU cores that Ray reserves for one engine with `placement = "ray"`."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory that Ray reserves for one engine with `placement = "ray"`."""
    max_running: int = Field(default=64, ge=1)
    """Maximum number of sequences that one engine decodes concurrently."""
    max_context_tokens: int | None = Field(default=None, ge=16)
    """Maximum number of tokens of prompt and answer together; None uses sampling.max_context_tokens."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    """Time limit from start to the first answer. Importing torch takes seconds; loading a large model takes minutes."""
    health_timeout_s: float = Field(default=10.0, gt=0)
    """Time limit for an engine to report its load; a slower engine misses the health check. Misses during a push do not
    count, because a push has its own deadlines."""
    health_misses: int = Field(default=3, ge=1)
    """Number of consecutive missed health checks after which an engine is replaced, or, if it is attached, taken out of
    routing. An engine whose process is dead is replaced at once."""
    drain_timeout_s: float = Field(default=10.0, gt=0)
    """Time in which an engine that is being removed may finish its requests; those that remain continue on another
    engine."""

    @property
    def is_simulated(self) -> bool:
        """True if there are no real engines, gateway or weights."""
        return self.backend == "simulated"

    @property
    def gpus(self) -> int:
        """Number of GPUs of the engines that the group starts."""
        return self.count * self.tensor_parallel if self.device == "cuda" and not self.is_simulated else 0

    @property
    def gpus_per_node(self) -> int:
        """Number of GPUs that one engine has on each of its hosts."""
        return self.tensor_parallel // self.nodes if self.device == "cuda" else 0

    @property
    def at_least(self) -> int:
        """Number of engines known before the run starts, at least 1 because a router's workers are not known yet."""
        return max(1, self.count + len(self.attach))

    @field_validator("attach", "router")
    @classmethod
    def _addresses(cls, given: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        for url in (given,) if isinstance(given, str) else given or ():
            check_url(url)
        return given

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.count and not self.attach and not self.router:
            raise ValueError(
                "engines.count is 0 and nothing is attached: raise it, list servers in engines.attach, or set "
                "engines.router"
            )
        if self.is_simulated and (self.attach or self.router or not self.count):
            raise ValueError(
                "engines.attach and engines.router need real servers: set engines.backend to cpu instead of simulated"
            )
        for name in ("data_parallel", "expert_parallel", "nodes"):
            if self.tensor_parallel % (size := getattr(self, name)):
                raise ValueError(
                    f"engines.{name} {size} does not divide engines.tensor_parallel {self.tensor_parallel}, the "
                    "devices of one server: change either"
                )
        if self.nodes > 1 and self.placement is not Placement.RAY:
            raise ValueError(f"engines.nodes {self.nodes} needs actors on several hosts: set engines.placement to ray")
        if self.backend == "cpu" and self.count:
            if self.device != "cpu":
                raise ValueError(
                    f"engines.backend cpu, the embedded engine, does not support device {self.device}: set "
                    "engines.backend to sglang"
                )
            if self.tensor_parallel > 1:
                raise ValueError(
                    "engines.tensor_parallel > 1 needs SGLang: set engines.backend to sglang, or "
                    "engines.tensor_parallel to 1"
                )
            if self.dtype != "auto":
                raise ValueError(
                    "engines.dtype needs SGLang, because the embedded engine uses the model's own data type: leave "
                    "engines.dtype at auto"
                )
        if self.gpus:
            given = [argument.split("=")[0] for argument in self.sglang.arguments]
            if claimed := [name for name in given if name in DEVICE_OPTIONS]:
                raise ValueError(
                    f"engines.sglang.arguments has {claimed[0]}, which selects GPUs that are not reserved for the "
                    f"engine: remove it, and set {DEVICE_OPTIONS[claimed[0]]}"
                )
        named = [argument.split("=")[0] for argument in self.sglang.arguments]
        if refused := [name for name in named if name in OWN_OPTIONS]:
            raise ValueError(
                f"engines.sglang.arguments has {refused[0]}, but the run gives its servers a key of its own, in "
                "a private configuration file: remove it, and list other options one by one"
            )
        seen: dict[tuple[str, int], str] = {}
        for url in self.attach:
            if (other := seen.setdefault(address(url), url)) is not url:
                raise ValueError(f"engines.attach: {other} and {url} are the same address; list it once")
        return self


def check_url(url: str) -> str:
    """Return the URL without a trailing slash. Raises ValueError when it is not `http://host:port`."""
    parts = urlsplit(url)
    try:
        named = parts.scheme in ("http", "https") and parts.hostname and parts.port is not None
    except ValueError:
        named = False
    if not named or parts.path.strip("/"):
        raise ValueError(f"{url} is not the base URL of a server: write http://host:port")
    return url.rstrip("/")
