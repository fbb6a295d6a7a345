"""Contract of the actor that supervises the runs of a cluster: its operations and messages. To add an operation,
declare its method here and write it in `Runs`.

Invariants:
- Every call may be repeated, except `resume`. A repeated submission (by key), drain, stop, addition or removal has the
  effect of one.
- Users call over `perform`, which knows their runs. Roles are checked where keys are: Ray's token allows everything.
- Calls about one run raise RunUnknown for an unknown id. Errors are of `headrace.actors.errors`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, Literal, ParamSpec, Protocol, TypeVar

from pydantic import Field

from headrace.actors.cluster.runs.operations import operation
from headrace.actors.cluster.runs.records import ApiRole, Caller, Recipe, RunEvent, RunId, RunRecord
from headrace.actors.engines.members_file import EngineStatus
from headrace.actors.errors import RunUnknown
from headrace.actors.run.node_drain import RunLeft
from headrace.actors.training.trainer_calls import Commit, Release, Take, TrainerCall, Weights

if TYPE_CHECKING:
    from headrace.actors.telemetry.page.access import PageAnswer
    from headrace.actors.telemetry.page.page_processes import PageRequest

P = ParamSpec("P")
R = TypeVar("R")

LEAVE_S: Final = 60.0
"""Time beyond its deadline within which a run must have left a drained node: engines end their requests, a learner its
step."""
ACTOR_NAME: Final = "runs"
RUN: Final = "/v1/runs/{run}"
LOG_BYTES: Final = 256 << 10
_TRAINER_S: Final = 100.0
"""Time for the learner to check the files of weights."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
Changes = Annotated[tuple[Annotated[str, Field(max_length=4096)], ...], Field(max_length=256)]
Url = Annotated[str, Field(min_length=1, max_length=2048)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """Next events of a run. If it is `ended`, none follow unless the run is resumed."""

    events: tuple[RunEvent, ...]
    ended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPage:
    """Next lines of a run's logs, and the `cursor` to continue from. If nothing follows at present, `lines` is
    empty."""

    lines: tuple[str, ...]
    cursor: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Readiness:
    """Result of the checks of a run; `problems` has one line for each that failed."""

    ledger_writable: bool
    engine_serving: bool
    learner_in_time: bool
    problems: tuple[str, ...] = ()

    @property
    def is_ready(self) -> bool:
        return self.ledger_writable and self.engine_serving and self.learner_in_time


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A living node: its resources in total, the free disk of its state folder and its free memory as its agent reports
    them (None without an agent), and the live runs with actors there."""

    node: str
    address: str
    role: str
    cpus: float
    gpus: float
    memory_bytes: int
    free_disk_bytes: int | None
    free_memory_bytes: int | None
    runs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDrained:
    """A drained node, and what each run had there, by its id."""

    node: str
    address: str
    runs: Mapping[str, RunLeft]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineChange:
    """An engine that was added to a run or removed from it."""

    engine_id: str
    done: Literal["add", "remove"]


def unknown_run(run: str) -> RunUnknown:
    """Return the error for a run that does not exist, or not for this caller: both have the same text."""
    return RunUnknown(f"there is no run {run[:64]!r}: runs have ids of 32 hexadecimal digits; GET /v1/runs lists yours")


class RunsApi(Protocol):
    """The actor, as its callers see it."""

    async def perform(self, name: str, caller: Caller, arguments: Mapping[str, Any]) -> Any:
        """Call the method `name` for a user. Raises RunUnknown for a run that the caller may not see, and what the
        method raises."""

    @operation("POST", "/v1/runs", ApiRole.OPERATE, status=201)
    async def submit(self, caller: Caller, name: Name, recipe: Recipe, idempotency_key: str) -> RunRecord:
        """Add a run of the caller's, or return the one that the same submission added before. Raises ConfigError,
        RoleTooSmall for what the caller's recipes may not name, SubmissionConflict, RunRefused if the owner has a live
        run of this name, QuotaExceeded if it could never start, and CannotBePlaced if no node has what it needs."""

    @operation("GET", "/v1/runs", ApiRole.READ, key="runs")
    async def runs(self, caller: Caller) -> tuple[RunRecord, ...]:
        """Return the runs of the caller, or of all owners for an admin, in the order of the queue."""

    @operation("GET", RUN, ApiRole.READ)
    async def run(self, caller: Caller, run_id: RunId) -> RunRecord:
        """Return one run."""

    @operation("POST", f"{RUN}/drain", ApiRole.OPERATE)
    async def drain(self, caller: Caller, run_id: RunId) -> RunRecord:
        """Let the run save a checkpoint and end. Returns at once. Raises RunRefused if it is being stopped."""

    @operation("POST", f"{RUN}/stop", ApiRole.OPERATE)
    async def stop(self, caller: Caller, run_id: RunId) -> RunRecord:
        """End the run. Returns at once."""

    # After a lost answer, a second request would find a live run and be refused.
    @operation("POST", f"{RUN}/resume", ApiRole.OPERATE, repeatable=False)
    async def resume(self, caller: Caller, run_id: RunId, changes: Changes = ()) -> RunRecord:
        """Queue an ended run again, with changed keys (`table.key=value`). Raises RunRefused if it is live or finished,
        ConfigError for a key that may not change, and RoleTooSmall if the caller could not submit the changed
        recipe."""

    @operation("POST", f"{RUN}/upgrade", ApiRole.OPERATE)
    async def upgrade(self, caller: Caller, run_id: RunId) -> RunRecord:
        """Let a live run save a checkpoint, end, and start again under what is installed. Returns at once. Raises
        RunRefused if it has ended, or is being drained or stopped."""

    @operation("GET", "/v1/nodes", ApiRole.ADMIN, key="nodes")
    async def nodes(self, caller: Caller) -> tuple[NodeStatus, ...]:
        """Return the living nodes."""

    @operation("POST", "/v1/nodes/{node}/drain", ApiRole.ADMIN, answer_s=LEAVE_S)
    async def drain_node(
        self, caller: Caller, node: str, deadline_s: Annotated[float, Field(ge=0, le=3600)] = 60.0
    ) -> NodeDrained:
        """Let all runs leave a node, named by its address or Ray id: no new rollouts and engines there. Returns once no
        rollout runs there; those that have not ended after `deadline_s` are issued elsewhere. Raises ConfigError for an
        unknown node and the control node."""

    async def events(self, caller: Caller, run_id: RunId, after: int, wait_s: float) -> EventPage:
        """Return the events after number `after`, as soon as there is one, the run has ended, or the time is over."""

    @operation("GET", f"{RUN}/status", ApiRole.READ)
    async def status(self, caller: Caller, run_id: RunId) -> dict[str, Any]:
        """Return the document of `headrace status --json`."""

    @operation("GET", f"{RUN}/report", ApiRole.READ, answer_s=40.0)
    async def report(self, caller: Caller, run_id: RunId) -> dict[str, Any]:
        """Return the document of `headrace report --json`."""

    async def page(self, run_id: RunId, request: PageRequest) -> PageAnswer:
        """Return the answer of the run's page. Raises RunRefused if it has none, or if it does not answer."""

    @operation("GET", f"{RUN}/engines", ApiRole.READ, key="engines")
    async def engines(self, caller: Caller, run_id: RunId) -> tuple[EngineStatus, ...]:
        """Return the engines of the run."""

    @operation("POST", f"{RUN}/engines", ApiRole.OPERATE)
    async def add_engine(
        self, caller: Caller, run_id: RunId, url: Url, timeout_s: Annotated[float, Field(ge=1, le=600)] = 120.0
    ) -> EngineChange:
        """Attach a server to a live run. The server is sent the run's key, so the caller must be one who could submit
        the recipe. Raises RoleTooSmall, RunRefused if the run is not live, and EngineGroupError."""

    @operation("DELETE", f"{RUN}/engines/{{engine}}", ApiRole.OPERATE)
    async def remove_engine(
        self, caller: Caller, run_id: RunId, engine_id: str, timeout_s: Annotated[float, Field(ge=0, le=600)] = 120.0
    ) -> EngineChange:
        """Remove an engine from a live run. Raises RunRefused if the run is not live, and EngineGroupError."""

    @operation("POST", f"{RUN}/take", ApiRole.OPERATE, body=Take)
    @operation("POST", f"{RUN}/commit", ApiRole.OPERATE, body=Commit, answer_s=_TRAINER_S)
    @operation("POST", f"{RUN}/release", ApiRole.OPERATE, body=Release, answer_s=_TRAINER_S)
    @operation("POST", f"{RUN}/weights", ApiRole.OPERATE, body=Weights, answer_s=_TRAINER_S)
    async def trainer(self, caller: Caller, run_id: RunId, call: TrainerCall) -> bytes:
        """Return the JSON answer of the run's learner to the user's trainer, whose question for an order may wait.
        Raises RoleTooSmall for weights in a folder that the caller may not name, RunRefused if the run is not live or
        trains by itself, LeaseLost, TrainerRefused, ModelInvalid, and ActorLost while the learner starts."""

    @operation("GET", f"{RUN}/logs", ApiRole.READ)
    async def logs(
        self,
        caller: Caller,
        run_id: RunId,
        actor: str | None = None,
        after: str = "",
        limit_bytes: Annotated[int, Field(ge=0, le=4 << 20)] = LOG_BYTES,
    ) -> LogPage:
        """Return complete lines of an actor's log, or of all logs, after the cursor (empty: from the beginning), of at
        most `limit_bytes` in all. Raises RunRefused for an unknown actor or cursor."""

    async def ready(self, caller: Caller, run_id: RunId) -> Readiness:
        """Check a run."""


Method = Callable[Concatenate[RunsApi, Caller, P], Awaitable[R]]
"""An operation, as its declaration is written: `RunsApi.drain`."""


class RunsClient(Protocol):
    """Client of a user's runs, over Ray (`ClusterClient`) or over HTTP (`ControlClient`)."""

    async def ask(self, method: Method[P, R], *arguments: P.args, **named: P.kwargs) -> R:
        """Return the result of an operation, without its caller, who is this client's user. Raises the operation's
        errors, and ActorLost if there is no answer in time."""

    def events(self, run_id: RunId, *, after: int = 0) -> AsyncGenerator[RunEvent, None]:
        """Yield the events of a run after number `after`, until the run has ended."""


async def perform(runs: RunsApi, name: str, caller: Caller, arguments: Mapping[str, Any]) -> Any:
    """See `RunsApi.perform`."""
    if (run_id := arguments.get("run_id")) is not None:
        try:
            owner = (await runs.run(caller, run_id)).owner
        except RunUnknown:
            owner = None
        if owner is None or not caller.sees(owner):
            if owner is not None and not caller.key:
                raise RunUnknown(f"run {run_id} belongs to {owner}, not to {caller.owner}: name its --owner")
            raise unknown_run(run_id)
    return await getattr(runs, name)(caller, **arguments)
