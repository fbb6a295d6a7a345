"""Outages: which party a failed attempt is charged to, and when no attempt may begin. Pure: the clock is an argument.

Invariants:
- A task is charged only for failures on different hosts at different times. Until then, a failure counts against the
  host on which it happened, or against the engines.
- While no engine is serving, or the system is failing, no task is charged: an attempt that ended in such an outage, or
  was running during part of it, is charged to the outage.
- The system is failing while more than half of the attempts that ended in the last `WINDOW_S` failed, over at least
  `LEAST_TASKS` tasks. Failures explained by an outage of the engines, a dead worker or a suspect host do not count.
- A source of tasks whose attempts fail in the same way, while other sources work, gets one probe a minute; that is not
  an outage, and its failures are charged as usual.
- A host is suspect, and gets only probes, while it has failed significantly more often in its last `ATTEMPTS` attempts
  than the other hosts in theirs, by Fisher's one-sided exact test at the level `LEVEL`. A single host is never suspect.
- Outages are records, so that they survive restarts. The window is not a record: it fills again after a restart.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import comb
from typing import Final

from headrace.buffer.core.classification import FAILED
from headrace.buffer.core.records import AttemptRecord, Charge, Component, HostFailures, OutageRecord
from headrace.buffer.core.source_names import source_name
from headrace.buffer.core.state import ReplayState
from headrace.buffer.core.task_history import TaskHistory
from headrace.buffer.tasks.task import TaskId
from headrace.buffer.trajectories.types import Cause

WINDOW_S: Final = 600.0
"""Age up to which the end of an attempt counts when deciding whether the system is failing."""
LEAST_TASKS: Final = 5
"""Minimum number of failing tasks for the system to count as failing."""
PROBE_S: Final = 60.0
"""Time between probes while the system is failing; the success of a probe ends the outage."""
APART_S: Final = 60.0
"""Failures that are closer together than this count as simultaneous."""

COUNTED: Final = frozenset({Charge.TASK, Charge.HOST, Charge.ENGINES, Charge.LEARNER})
"""Failures that use up one of a rollout's `max_attempts`."""
ATTEMPTS: Final = 20
LEVEL: Final = 0.01


@dataclass(frozen=True, slots=True)
class _End:
    """End of an attempt."""

    at_s: float
    task_id: TaskId
    failed: bool


class RecentEnds:
    """Ends of attempts in the last `WINDOW_S`. They are kept when the core is folded again. `sources` are the names of
    the run's sources of tasks, if it has any."""

    def __init__(self, sources: Collection[str] = ()) -> None:
        self._sources = sources
        self.ends: deque[_End] = deque()
        self.hosts = HostRecords()
        self.probed_s: float | None = None
        """Time of the last probe of a failing system."""
        self.probed_of: dict[str, float] = {}
        """Time of the last probe of each failing source."""
        self._failing_sources: dict[str, str] | None = None

    def add(self, task_id: TaskId, *, failed: bool, now: float) -> None:
        """Add the end of an attempt."""
        self.ends.append(_End(now, task_id, failed))
        self._failing_sources = None

    def forget(self, now: float) -> None:
        """Forget ends that are older than the window, or were recorded before the clock was set back."""
        while self.ends and not 0.0 <= now - self.ends[0].at_s <= WINDOW_S:
            self.ends.popleft()
            self._failing_sources = None

    def clear(self) -> None:
        """Forget all ends."""
        self.ends.clear()
        self._failing_sources = None

    def failing(self) -> str:
        """Return why the system counts as failing; empty while it is not failing. A failing source does not make a
        failing system as long as another source works."""
        sources = {source_name(end.task_id) for end in self.ends} if self._sources else set()
        if not sources <= self.failing_sources().keys():
            return ""
        reason = failures_of(self.ends)
        return f"{reason} of {', '.join(sorted(sources))}" if reason and sources else reason

    def failing_sources(self) -> dict[str, str]:
        """Return the sources whose attempts mostly fail, with the reasons."""
        if self._failing_sources is None:
            by_source: dict[str, list[_End]] = {name: [] for name in self._sources}
            for end in self.ends if self._sources else ():
                by_source[source_name(end.task_id)].append(end)
            reasons = {name: failures_of(ends) for name, ends in by_source.items()}
            self._failing_sources = {name: reason for name, reason in reasons.items() if reason}
        return self._failing_sources

    def forgive(self, source: str) -> None:
        """Forget the failures of a source, because a probe of it has succeeded."""
        self.ends = deque(end for end in self.ends if not end.failed or source_name(end.task_id) != source)
        self._failing_sources = None
        self.probed_of.pop(source, None)


def failures_of(ends: Collection[_End]) -> str:
    """Return why the attempts that ended so count as failing; empty if they do not."""
    failed = [end.task_id for end in ends if end.failed]
    tasks = len(set(failed))
    if tasks < LEAST_TASKS or 2 * len(failed) <= len(ends):
        return ""
    return f"{len(failed)} of the last {len(ends)} attempts failed, over {tasks} tasks"


class Outages:
    """Charges failures, and limits how many attempts may begin."""

    def __init__(self, state: ReplayState, history: TaskHistory, recent: RecentEnds) -> None:
        self._state, self._history, self._recent = state, history, recent

    def engines(self, *, serving: bool, now: float) -> None:
        """Record whether any engine is serving from now on; idempotent."""
        current = self._open(Component.ENGINES)
        if serving and current is not None:
            self._end(current, now)
        elif not serving and current is None:
            self._begin(Component.ENGINES, "no engine serves", now)

    def allowed(self, now: float) -> int | None:
        """Return how many attempts may begin now; None: as many as are admitted."""
        if self._open(Component.ENGINES) is not None:
            return 0
        self._update(now)
        if self._open(Component.SYSTEM) is None:
            return None
        return int(self._probe_in_s(now) <= 0)

    def began(self, now: float) -> None:
        """Record that attempts began."""
        if self._open(Component.SYSTEM) is not None:
            self._recent.probed_s = now

    def began_of(self, source: str, now: float) -> None:
        """Record that an attempt of a source began, which is a probe if the source is failing."""
        if source in self._recent.failing_sources():
            self._recent.probed_of[source] = now

    def failing_sources(self) -> Mapping[str, str]:
        """Return the sources that get only one probe a minute, with the reason for each."""
        return self._recent.failing_sources()

    def held_sources(self, now: float) -> Collection[str]:
        """Return the failing sources of which no attempt may begin now."""
        return {source for source in self._recent.failing_sources() if self._source_probe_in_s(source, now) > 0}

    def to_spare(self) -> Collection[TaskId]:
        """Return the tasks that a probe should avoid: they have failed recently, possibly through their own fault, so
        another failure would say little about the system."""
        if self._open(Component.SYSTEM) is None:
            return ()
        return {end.task_id for end in self._recent.ends if end.failed}

    def wakes_at(self, now: float) -> float | None:
        """Return when the next probe may begin; None when no probe is due."""
        if self._open(Component.ENGINES) is not None:
            return None
        if self._open(Component.SYSTEM) is not None:
            return now + max(0.0, self._probe_in_s(now))
        waits_s = [self._source_probe_in_s(source, now) for source in self.held_sources(now)]
        return now + min(waits_s) if waits_s else None

    def avoided(self, attempt: AttemptRecord | None, now: float) -> tuple[str, ...]:
        """Return the hosts that the next attempt of a rollout should not run on: suspect hosts, and the one where the
        rollout's last attempt failed."""
        failed_on = () if attempt is None or attempt.charged_to is None or not attempt.host else (attempt.host,)
        return tuple(dict.fromkeys((*self._recent.hosts.avoided(now), *failed_on)))

    def suspects(self) -> Mapping[str, str]:
        """Return the hosts that get only one probe a minute, with the reason for each."""
        return self._recent.hosts.suspects()

    def held(self) -> str:
        """Return why no attempts may begin; empty while they may."""
        held = (self._open(component) for component in Component)
        return "; ".join(f"{outage.reason}, since {utc(outage.began_at_s)}" for outage in held if outage is not None)

    def charge(
        self, attempt: AttemptRecord, task_id: TaskId, *, engine_failed: bool, untrainable: bool, now: float
    ) -> Charge | None:
        """Return the party charged for an attempt that has just ended; None when it did not fail."""
        assert attempt.cause is not None
        if attempt.cause not in FAILED:
            return None
        if not attempt.offered:
            return Charge.WORKER
        if untrainable:
            return Charge.LEARNER
        if any(self._ran_during(attempt, component) for component in Component):
            return Charge.OUTAGE
        if engine_failed:
            return Charge.ENGINES
        return Charge.TASK if apart(self._history.failed_on(task_id, attempt.host, now)) else Charge.HOST

    def ended(self, attempt: AttemptRecord, task_id: TaskId, now: float) -> None:
        """Add the end of an attempt to the window, after it has been charged."""
        if not attempt.offered or attempt.cause is Cause.CANCELLED:
            return
        # A result that only the learner cannot train says that everything else works.
        failed = attempt.charged_to not in (None, Charge.LEARNER)
        if failed and self._ran_during(attempt, Component.ENGINES):
            return
        if attempt.charged_to is not Charge.ENGINES:
            self._recent.hosts.add(attempt.host, failed=failed)
        if failed and attempt.host in self._recent.hosts.suspects():
            return
        current = self._open(Component.SYSTEM)
        if not failed and current is not None and attempt.issued_at_s >= current.began_at_s:
            # A probe succeeded: earlier failures no longer describe the system.
            self._recent.clear()
        source = source_name(task_id)
        if not failed and attempt.issued_at_s >= self._recent.probed_of.get(source, math.inf):
            self._recent.forgive(source)
        self._recent.add(task_id, failed=failed, now=now)
        self._update(now)

    def _update(self, now: float) -> None:
        """Begin or end the system outage, as the window requires."""
        self._recent.forget(now)
        reason, current = self._recent.failing(), self._open(Component.SYSTEM)
        if reason and current is None:
            self._begin(Component.SYSTEM, reason, now)
            self._recent.probed_s = now
            first_s = self._recent.ends[0].at_s
            for task_id in {end.task_id for end in self._recent.ends if end.failed}:
                self._history.forgive(task_id, since_s=first_s)
        elif not reason and current is not None:
            self._end(current, now)

    def _probe_in_s(self, now: float) -> float:
        return _next_probe_in_s(self._recent.probed_s, now)

    def _source_probe_in_s(self, source: str, now: float) -> float:
        return _next_probe_in_s(self._recent.probed_of.get(source), now)

    def _ran_during(self, attempt: AttemptRecord, component: Component) -> bool:
        """Return whether the component had an outage at any time during the attempt."""
        return any(
            outage.component is component
            and outage.began_at_s <= (attempt.ended_at_s or 0.0)
            # Attempts that begin at the end of an outage have the same time.
            and (outage.ended_at_s is None or outage.ended_at_s > attempt.issued_at_s)
            for outage in self._state.outages.values()
        )

    def _open(self, component: Component) -> OutageRecord | None:
        return next(
            (
                outage
                for outage in reversed(self._state.outages.values())
                if outage.component is component and outage.ended_at_s is None
            ),
            None,
        )

    def _begin(self, component: Component, reason: str, now: float) -> None:
        number = max(self._state.outages, default=0) + 1
        self._state.put(OutageRecord(number=number, component=component, reason=reason, began_at_s=now))
        self._state.count(f"outages_{component}")

    def _end(self, outage: OutageRecord, now: float) -> None:
        self._state.put(replace(outage, ended_at_s=now))


def _next_probe_in_s(last_s: float | None, now: float) -> float:
    # A clock that was set back must not hold orders for hours.
    since_s = PROBE_S if last_s is None else now - last_s
    return PROBE_S - since_s if since_s >= 0 else 0.0


def apart(failures: tuple[HostFailures, ...]) -> bool:
    """True if there are failures on different hosts at different times."""
    return any(
        max(abs(one.last_at_s - other.first_at_s), abs(other.last_at_s - one.first_at_s)) >= APART_S
        for number, one in enumerate(failures)
        for other in failures[:number]
    )


def utc(seconds: float) -> str:
    """Return a Unix time as text."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


class HostRecords:
    """Ends of the last attempts on each host."""

    def __init__(self) -> None:
        self._ends: dict[str, deque[bool]] = {}
        self._probed_s: dict[str, float] = {}

    def add(self, host: str, *, failed: bool) -> None:
        """Add the end of an attempt; ends on unknown hosts are ignored."""
        if host:
            self._ends.setdefault(host, deque(maxlen=ATTEMPTS)).append(failed)

    def suspects(self) -> Mapping[str, str]:
        """Return the suspect hosts, with the reason for each."""
        suspects = {}
        for host, ends in self._ends.items():
            others = [end for other, seen in self._ends.items() if other != host for end in seen]
            if others and exact_test(sum(ends), len(ends), sum(others), len(others)) < LEVEL:
                suspects[host] = f"{sum(ends)} of its last {len(ends)} attempts failed"
        return suspects

    def avoided(self, now: float) -> tuple[str, ...]:
        """Return the hosts that an attempt beginning now must avoid. A host that is due for a probe is left out of
        the result once."""
        avoided = []
        for host in self.suspects():
            since_s = now - self._probed_s.setdefault(host, now)
            # A clock that was set back must not put a probe off for hours.
            if 0.0 <= since_s < PROBE_S:
                avoided.append(host)
            else:
                self._probed_s[host] = now
        return tuple(avoided)


def exact_test(failed: int, attempts: int, others_failed: int, others: int) -> float:
    """Return the p-value of Fisher's exact test, one-sided: the probability that at least `failed` of all failures are
    among `attempts`, if all hosts are equally likely to fail."""
    failures, whole = failed + others_failed, attempts + others
    most = min(attempts, failures)
    ways = sum(comb(failures, k) * comb(whole - failures, attempts - k) for k in range(failed, most + 1))
    return ways / comb(whole, attempts)
