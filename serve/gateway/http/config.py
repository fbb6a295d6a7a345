"""The configuration of a gateway: the recipe's `[gateway]` table and the settings that its launcher adds."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field

from headrace.buffer.primitives.sections import Section
from headrace.policies.processes.engine_keys import EngineKeyFiles
from headrace.serve.gateway.exports.export_form import ExportForm


class ModelUse(StrEnum):
    """Use of the turns that an agent requests under a model name."""

    TRAIN = "train"
    """Sampled from the policy and trained."""
    SERVE = "serve"
    """Sampled from the policy, masked as `side`."""
    REFUSE = "refuse"
    """Refused with 400."""


class GatewaySection(Section):
    """Keys of the `[gateway]` table of a recipe. `GatewayConfig` inherits them, so that each default exists once."""

    processes: int = Field(default=1, ge=1, le=64)
    """Number of gateways on each node of the role rollout, each with a port, a session log and render processes of its
    own, at most one for each core. A session's id decides which one has it."""
    parser: str = "auto"
    """Parser for tool calls and reasoning: auto (chosen from the chat template), hermes, qwen3_coder, none, or
    sglang:NAME for one of SGLang's parsers."""
    model_policy: tuple[tuple[str, ModelUse], ...] = ()
    """Pairs of a pattern and a use, e.g. [["*haiku*", "serve"]]; the first pattern that matches a request's model name
    decides. The uses are `train` (also for names that match no pattern), `serve` (sampled, masked as `side`) and
    `refuse`."""
    turn_timeout_s: float = Field(default=300.0, gt=0)
    """Timeout of one engine call; after that, the call is aborted and retried on another engine. Time during which a
    push holds the engine does not count."""


class GatewayConfig(GatewaySection):
    """All settings of one gateway."""

    tokenizer_dir: Path | None = None
    """Directory with the policy's tokenizer.json and chat template. None when a renderer is passed in."""
    vocab_size: int | None = Field(default=None, ge=1)
    """Number of token ids of the model (padding may make it larger than the tokenizer's). None: `vocab_size` of the
    config.json next to the tokenizer, or else the tokenizer's size. Ids outside this range are never sent to an
    engine."""
    token_kinds: bool = False
    """Record the kind of each token (prompt, scaffold, observation, sampled), which an objective on observations needs.
    It costs a second render of each prompt."""
    engine_keys: EngineKeyFiles = EngineKeyFiles()
    """Files with the keys of the engines, which must be readable on the gateway's host. They are read when a routing
    table names an engine for the first time."""
    place: int | None = None
    """Number of this process among those of one gateway, with which the tokens of its sessions begin; None if it is the
    only one."""
    advertise_url: str | None = None
    """Base of the URLs given to agents that run on other hosts; None for the bound address."""
    session_log_dir: Path | None = None
    """Folder of the session logs, from which a restarted gateway restores its sessions. None: sessions end with the
    process."""
    export_dir: Path | None = None
    """Folder into which each finished session is written, of this gateway alone. None: sessions are not exported."""
    export_form: ExportForm = ExportForm.ROWS
    """Form of the files in `export_dir`."""
    max_context_tokens: int | None = Field(default=None, ge=1)
    """The engines' context length, prompt and output together; an upper bound for every session's."""
    foreign_version: str | None = None
    """Version to use in place of an engine's weight version that does not have the form `epoch.step`; if None, such a
    turn fails."""
    in_place_pushes: bool = False
    """True when pushes leave running requests their KV cache; tokens sampled on a stale cache are flagged."""
    abort_grace_s: float = Field(default=2.0, gt=0)
    """Time that an aborted engine call has to return its partial tokens."""
    expire_grace_s: float = Field(default=60.0, gt=0)
    """Time after the end of its wall-time budget during which a session can still be finished; after that, it is
    forgotten."""
    finished_grace_s: float = Field(default=600.0, ge=0)
    """Time during which a finished session can be finished again, with the same report, in case the response was lost;
    requires session_log_dir."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Size limit of a request body; larger ones are refused with 413."""
    max_imbalance: int = Field(default=8, ge=0)
    """A session leaves its usual engine when that engine has more than this many more requests in flight than the least
    busy one."""

    gate_wait_s: float = Field(default=60.0, gt=0)
    """Longest time that a turn waits for an available engine; after that, the agent gets an infra error. Time during
    which a push holds an engine does not count."""
    ping_s: float = Field(default=10.0, gt=0)
    """Interval between pings on a stream that is waiting for its turn; some agents give up after 15 s without one."""
    render_processes: int = Field(default=2, ge=1, le=64)
    """Most processes that render long texts; they are started when there is work for them. With several, one is kept
    for short work. Each needs about as much memory as the gateway itself."""
    render_cpu_s: float = Field(default=20.0, gt=0)
    """Processor time that the rendering of one request may take; after that, its process is replaced and the request
    refused."""
    held_after_s: float = Field(default=5.0, gt=0)
    """If a turn is interrupted after this long without a sampled token, its rollout's outcome is infra, not a spent
    budget."""
    header_timeout_s: float = Field(default=60.0, gt=0)
    """Time for the head of a request: from the start of a connection, or from the first byte of a later request on it.
    After that, it is refused with 408."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Time for the body of a request, the wait for room in the gateway included. After that, it is refused: with 408,
    or as an infra error if it waited for room."""
    send_timeout_s: float = Field(default=60.0, gt=0)
    """Time in which a client has to read an answer or a ping. After that, its connection is reset, and the answer
    counts as not delivered."""
    max_total_body_bytes: int = Field(default=512 * 2**20, ge=1024)
    """Number of bytes of request bodies that all sessions of a gateway can have in it at a time; more waits until there
    is room, the sessions with the fewest bytes first."""

    @property
    def session_body_bytes(self) -> int:
        """Number of bytes of request bodies that one session can have in the gateway at a time, until they
        are parsed; more is refused with 429."""
        return 2 * self.max_body_bytes
