"""Records of the runs of a cluster: their states, and the transitions that are allowed between them.

Invariants:
- `desired` is what users want of a run, `actual` is what the run does. Only users change the first, and only the
  supervisor changes the second. (A run that waits has no service, so what users want of it holds at once.)
- A run that ended has `actual` in `ENDED`. All others are live, and their names are unique for each owner.
- Every reason and every text of an event is one line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Final, NewType

RunId = NewType("RunId", str)
"""32 hexadecimal digits."""
RUN_ID: Final = re.compile(r"[0-9a-f]{32}")

Recipe = Mapping[str, Mapping[str, Any]]
"""Tables of a recipe as in its TOML file, after overrides; its paths are absolute on the nodes of the cluster."""


class ApiRole(IntEnum):
    """What a key of the control API allows; a larger role includes the smaller ones."""

    READ = 1
    """See the owner's runs."""
    OPERATE = 2
    """Submit and change them, with registered parts, listed folders and the owner's secrets (`grants`)."""
    CODE = 3
    """Name any code and file in them, which Ray's user then runs and reads."""
    ADMIN = 4
    """See and change the runs of all owners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The user of a key, or of Ray's token. `key` is the beginning of the key's SHA-256, as in the key file."""

    owner: str
    role: ApiRole
    key: str = ""

    @property
    def may_name_code(self) -> bool:
        return self.role >= ApiRole.CODE

    def sees(self, owner: str) -> bool:
        """Return True if runs of `owner` exist for this caller."""
        return self.role is ApiRole.ADMIN or self.owner == owner

    def __str__(self) -> str:
        return f"key {self.key} ({self.role.name.lower()})" if self.key else "Ray's token"


RAY_USER: Final = Caller(owner="", role=ApiRole.CODE)
"""Caller over Ray, of an owner whom the client names. Whoever has the token of a cluster can do everything there: the
owner keeps users apart, and protects nothing."""


class DesiredState(StrEnum):
    """State that users want a run to have."""

    RUNNING = "running"
    DRAINED = "drained"
    """The run saves a checkpoint and ends; it can be resumed."""
    STOPPED = "stopped"
    """The run ends at once; it can be resumed from its last checkpoint."""
    UPGRADED = "upgraded"
    """The run saves a checkpoint, ends, and starts again under the version that is installed then."""


class ActualState(StrEnum):
    """State of a run."""

    WAITING = "waiting"
    """It has no service: it waits for its quota, for other runs of its owner, or for its next try."""
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    FINISHED = "finished"
    """All steps are done, or the data is used up."""
    DRAINED = "drained"
    STOPPED = "stopped"
    FAILED = "failed"
    """It ended with an error, and no tries are left or another try would fail again."""


ENDED: Final = frozenset({ActualState.FINISHED, ActualState.DRAINED, ActualState.STOPPED, ActualState.FAILED})
"""States without actors, engines and sandboxes."""

RESUMABLE: Final = frozenset({ActualState.DRAINED, ActualState.STOPPED, ActualState.FAILED})
"""States of ended runs that have something left to do."""

TRANSITIONS: Final[Mapping[ActualState, frozenset[ActualState]]] = {
    ActualState.WAITING: RESUMABLE | {ActualState.STARTING},
    ActualState.STARTING: ENDED | {ActualState.RUNNING, ActualState.DRAINING, ActualState.WAITING},
    # STARTING: a lost or replaced service. WAITING: the next try comes later.
    ActualState.RUNNING: ENDED | {ActualState.DRAINING, ActualState.STARTING, ActualState.WAITING},
    # STARTING: the service was lost while it drained, and a new one completes that; or it was replaced. WAITING: it was
    # drained for an upgrade.
    ActualState.DRAINING: ENDED | {ActualState.STARTING, ActualState.WAITING},
    **{state: frozenset() for state in ENDED},
}
"""States that may follow each state. An ended run is only queued again, by `RunsTable.requeue`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What a run takes of its owner's quota."""

    rollouts: int = 0
    """Largest number of rollouts in flight."""
    engines: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What a run is started with: its resolved configuration by digest, the version of headrace, and its demands. A
    live service is adopted only if digest and version are the same."""

    config_digest: str
    headrace_version: str
    demands: Demands
    restarts: int = 0
    """Number of further tries after transient failures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """Request to run a recipe. `idempotency_key` is the client's: a repeated submission returns the same run. In the
    storage, `names_code` is that of the run (`RunRecord`)."""

    name: str
    owner: str
    recipe: Recipe
    idempotency_key: str
    names_code: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run. Times are Unix seconds."""

    run_id: RunId
    name: str
    owner: str
    idempotency_key: str
    submitted_s: float
    position: int
    """Place in the queue, larger for those submitted or resumed later; unique in the table."""
    desired: DesiredState = DesiredState.RUNNING
    actual: ActualState = ActualState.WAITING
    reason: str = ""
    """Why the run waits or failed."""
    exit_code: int | None = None
    """Exit code of `headrace run` for how the run ended; None while it is live."""
    restarts_left: int = 0
    next_try_s: float | None = None
    """Time of the next try of a run that waits after a transient failure; such a run keeps its share of the quota."""
    config_digest: str
    headrace_version: str
    demands: Demands
    names_code: bool = False
    """The role that set its recipe allows it to name any code and file."""

    @property
    def is_live(self) -> bool:
        return self.actual not in ENDED


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """One event of a run; numbers count from 1 for each run, without gaps."""

    number: int
    time_s: float
    state: ActualState
    """State after the event."""
    text: str
