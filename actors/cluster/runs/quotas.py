"""Quotas of owners, what their recipes may name (`grants`), and the choice of the runs that may start.

Invariants:
- Live runs with a service, and those that wait for their next try, hold their demands. What an owner's runs hold stays
  within the owner's quota whenever a run starts. (Lowering a quota ends no run.)
- An owner's runs start strictly in the order of the queue: while one waits for the quota, no later one starts.
- The runs of other owners are of no consequence for an owner's runs.
- The choice has no clock and no I/O: the same records and quotas give the same plan.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Final, Self

import orjson
from pydantic import AfterValidator, Field, ValidationError, model_validator

from headrace.actors.cluster.runs.records import ActualState, Demands, RunId, RunRecord
from headrace.actors.cluster.runs.table import NAME
from headrace.actors.errors import ConfigError, QuotaExceeded
from headrace.buffer.primitives.sections import Section


def _absolute(path: Path) -> Path:
    if not path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{path} must be an absolute path without '..'")
    return path


Folder = Annotated[Path, AfterValidator(_absolute)]
Limit = Annotated[int | None, Field(ge=0, strict=True)]


class Quota(Section):
    """Limits for the live runs of one owner (None is no limit), and what its recipes may name without the role
    `code`."""

    runs: Limit = None
    """Number of runs with a service."""
    rollouts: Limit = None
    """Rollouts in flight of all these runs."""
    engines: Limit = None
    folders: tuple[Folder, ...] = ()
    """Folders with models, tasks and the data of environments."""
    parts: tuple[str, ...] = ()
    """Import paths of agents, environments, providers, services, objectives and evaluators."""
    flags: tuple[str, ...] = ()
    """Flags of slime, Megatron and SGLang."""
    urls: tuple[str, ...] = ()
    """URLs to which nodes may send credentials of their environment, and to all paths below them."""


class Quotas(Section):
    """Quotas of all owners. A key that an owner's table leaves out has its value in `default`."""

    default: Quota = Quota()
    owners: dict[str, Quota] = Field(default_factory=dict)
    secrets: Folder | None = None
    """Folder, on every node, with the secrets of each owner: `OWNER/NAME`, files of mode 600 of Ray's user."""

    @model_validator(mode="after")
    def _secrets_are_no_data(self) -> Self:
        secrets = self.secrets and self.secrets.resolve()
        for folder in {folder for quota in (self.default, *self.owners.values()) for folder in quota.folders}:
            place = folder.resolve()
            if secrets is not None and (secrets.is_relative_to(place) or place.is_relative_to(secrets)):
                raise ValueError(f"folders has {folder}, where recipes could read {self.secrets} as data")
        return self

    def of(self, owner: str) -> Quota:
        own = self.owners.get(owner, self.default)
        return self.default.model_copy(update=own.model_dump(include=own.model_fields_set))


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPlan:
    """Runs to start now, and why each of the other waiting runs waits."""

    start: tuple[RunId, ...] = ()
    reasons: Mapping[RunId, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Excess:
    """A limit that a run would exceed."""

    limit: str
    allowed: int
    needed: int


_SHARES: Final[Mapping[str, Callable[[Demands], int]]] = {
    "runs": lambda demands: 1,
    "rollouts": lambda demands: demands.rollouts,
    "engines": lambda demands: demands.engines,
}
"""What a run takes of each limit."""


def load_quotas(path: Path) -> Quotas:
    """Read quotas from a TOML file, or a JSON file if its name ends so. Raises ConfigError."""
    try:
        data = path.read_bytes()
        document = orjson.loads(data) if path.suffix == ".json" else tomllib.loads(data.decode())
        quotas = Quotas.model_validate(document)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); name a readable file of quotas") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        fix = "keys are secrets and the tables [default] and [owners.NAME], with " + ", ".join(Quota.model_fields)
        raise ConfigError(f"{path}: {key}: {first['msg']}; {fix}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: cannot be parsed: {error}; write TOML, or JSON in a file NAME.json") from error
    for owner in quotas.owners:
        if not NAME.fullmatch(owner):
            raise ConfigError(f"{path}: owners.{owner!r}: names of owners have letters, digits, '.', '_' and '-' only")
    return quotas


def refuse_oversized(owner: str, demands: Demands, quotas: Quotas) -> None:
    """Raise QuotaExceeded if a run with these demands could never start."""
    for excess in _excesses(quotas.of(owner), (), demands):
        raise QuotaExceeded(
            f"the run needs {excess.limit} {excess.needed}, but the quota of {owner} is {excess.allowed}: make the run "
            "smaller, or raise the quota"
        )


def next_to_start(records: Iterable[RunRecord], quotas: Quotas, *, now_s: float) -> StartPlan:
    """Return the waiting runs that may start now, as if all of them started, and the reasons for the others."""
    by_owner: dict[str, list[RunRecord]] = {}
    for record in sorted(records, key=lambda record: record.position):
        by_owner.setdefault(record.owner, []).append(record)
    start: list[RunId] = []
    reasons: dict[RunId, str] = {}
    for owner, runs in by_owner.items():
        for record, reason in _choices(runs, quotas.of(owner), now_s):
            if reason:
                reasons[record.run_id] = reason
            else:
                start.append(record.run_id)
    return StartPlan(start=tuple(start), reasons=reasons)


def _choices(runs: list[RunRecord], quota: Quota, now_s: float) -> Iterator[tuple[RunRecord, str]]:
    """Yield each waiting run of one owner with the reason why it waits, empty if it may start."""
    holders = [
        one for one in runs if one.is_live and (one.actual is not ActualState.WAITING or one.next_try_s is not None)
    ]
    first_waiting: RunRecord | None = None
    for run in runs:
        if run.actual is not ActualState.WAITING:
            continue
        if run.next_try_s is not None:
            yield run, run.reason or "waits for its next try" if run.next_try_s > now_s else ""
        elif first_waiting is not None:
            yield run, f"waits behind {_named(first_waiting)}, which came earlier"
        elif excess := next(_excesses(quota, [one.demands for one in holders], run.demands), None):
            first_waiting = run
            yield run, _reason(run.owner, excess, holders)
        else:
            holders.append(run)
            yield run, ""


def _excesses(quota: Quota, held: Sequence[Demands], demands: Demands) -> Iterator[_Excess]:
    for limit, share in _SHARES.items():
        allowed, needed = getattr(quota, limit), share(demands)
        # A run that needs none of something is not held back by a quota that others have used up.
        if allowed is not None and needed and sum(map(share, held)) + needed > allowed:
            yield _Excess(limit=limit, allowed=allowed, needed=needed)


def _reason(owner: str, excess: _Excess, holders: list[RunRecord]) -> str:
    shares = ((run, _SHARES[excess.limit](run.demands)) for run in holders)
    held = ", ".join(f"{amount} by {_named(run)}" for run, amount in shares if amount)
    return f"needs {excess.limit} {excess.needed}; the quota of {owner} is {excess.allowed}, held: {held or 'nothing'}"


def _named(run: RunRecord) -> str:
    return f"{run.name} ({run.run_id[:8]})"
