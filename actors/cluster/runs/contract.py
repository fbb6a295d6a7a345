"""Contract of the actor that supervises the runs of a cluster: its calls and messages.

Invariants:
- Every call may be repeated. A repeated submission (by key), drain, stop, addition or removal has the effect of one.
- The caller has checked that the run belongs to the user: the actor knows owners, and of a user the role and the name
  of the key, for events and for what a recipe may name (`grants`).
- Calls about one run raise RunUnknown for an unknown id. Errors are of `headrace.actors.errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from headrace.actors.cluster.runs.records import Caller, RunEvent, RunId, RunRecord, Submission
from headrace.actors.engines.members_file import EngineStatus
from headrace.actors.run.node_drain import RunLeft
from headrace.actors.training.trainer_calls import TrainerCall

if TYPE_CHECKING:
    from headrace.actors.telemetry.page.access import PageAnswer
    from headrace.actors.telemetry.page.page_processes import PageRequest

LEAVE_S: Final = 60.0
"""Time beyond its deadline within which a run must have left a drained node: engines end their requests, a learner its
step."""
ACTOR_NAME: Final = "runs"


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


class RunsApi(Protocol):
    """The actor, as its callers see it."""

    async def submit(self, submission: Submission, caller: Caller) -> RunRecord:
        """Add a run, or return the one that the same submission added before. Raises ConfigError, RoleTooSmall for what
        the caller's recipes may not name, SubmissionConflict, RunRefused if the owner has a live run of this name,
        QuotaExceeded if it could never start, and CannotBePlaced if no node has what it needs."""
        ...

    async def runs(self, owner: str | None) -> tuple[RunRecord, ...]:
        """Return the runs of an owner, or of all owners, in the order of the queue."""
        ...

    async def run(self, run_id: RunId) -> RunRecord:
        """Return one run."""
        ...

    async def drain(self, run_id: RunId, caller: Caller) -> RunRecord:
        """Let the run save a checkpoint and end. Returns at once. Raises RunRefused if it is being stopped."""
        ...

    async def stop(self, run_id: RunId, caller: Caller) -> RunRecord:
        """End the run. Returns at once."""
        ...

    async def resume(self, run_id: RunId, changes: tuple[str, ...], caller: Caller) -> RunRecord:
        """Queue an ended run again, with changed keys (`table.key=value`). Raises RunRefused if it is live or finished,
        ConfigError for a key that may not change, and RoleTooSmall if the caller could not submit the changed
        recipe."""
        ...

    async def upgrade(self, run_id: RunId, caller: Caller) -> RunRecord:
        """Let a live run save a checkpoint, end, and start again under what is installed. Returns at once. Raises
        RunRefused if it has ended, or is being drained or stopped."""
        ...

    async def nodes(self) -> tuple[NodeStatus, ...]:
        """Return the living nodes."""
        ...

    async def drain_node(self, node: str, deadline_s: float, caller: Caller) -> NodeDrained:
        """Let all runs leave a node, named by its address or Ray id: no new rollouts and engines there. Returns once no
        rollout runs there; those that have not ended after `deadline_s` are issued elsewhere. Raises ConfigError for an
        unknown node and the control node."""
        ...

    async def events(self, run_id: RunId, after: int, timeout_s: float) -> EventPage:
        """Return the events after number `after`, as soon as there is one, the run has ended, or the time is over."""
        ...

    async def status(self, run_id: RunId) -> dict[str, Any]:
        """Return the document of `headrace status --json`."""
        ...

    async def report(self, run_id: RunId) -> dict[str, Any]:
        """Return the document of `headrace report --json`."""
        ...

    async def page(self, run_id: RunId, request: PageRequest) -> PageAnswer:
        """Return the answer of the run's page. Raises RunRefused if it has none, or if it does not answer."""
        ...

    async def engines(self, run_id: RunId) -> tuple[EngineStatus, ...]:
        """Return the engines of the run."""
        ...

    async def add_engine(self, run_id: RunId, url: str, timeout_s: float, caller: Caller) -> str:
        """Attach a server to a live run, and return the name of the engine. The server is sent the run's key, so the
        caller must be one who could submit the recipe. Raises RoleTooSmall, RunRefused if the run is not live, and
        EngineGroupError."""
        ...

    async def remove_engine(self, run_id: RunId, engine_id: str, timeout_s: float, caller: Caller) -> str:
        """Remove an engine from a live run, and return its name. Raises RunRefused if the run is not live, and
        EngineGroupError."""
        ...

    async def trainer(self, run_id: RunId, call: TrainerCall, caller: Caller) -> bytes:
        """Return the JSON answer of the run's learner to the user's trainer, whose question for an order may wait.
        Raises RoleTooSmall for weights in a folder that the caller may not name, RunRefused if the run is not live or
        trains by itself, LeaseLost, TrainerRefused, ModelInvalid, and ActorLost while the learner starts."""
        ...

    async def logs(self, run_id: RunId, actor: str | None, after: str, limit_bytes: int) -> LogPage:
        """Return complete lines of an actor's log, or of all logs, after the cursor (empty: from the beginning), of at
        most `limit_bytes` in all. Raises RunRefused for an unknown actor or cursor."""
        ...

    async def ready(self, run_id: RunId) -> Readiness:
        """Check a run."""
        ...
