"""The order of a weight push through waves of engines. Pure: no clock, no I/O.

Invariants:
- Phases of a wave: probe, form, gate, pause, begin, broadcast, end, flush, verify, resume, open, disband. Nothing is
  broadcast before every engine of the group has answered `begin`; after a loss a new group is formed first.
- An engine that got a bucket and then failed is tainted: it may hold mixed weights and is neither resumed nor opened.
- Every other engine that was gated, paused or in a session leaves all three, whatever happened.
- Waves go one after another. A failed engine never stops the others; a dead sender stops the push.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from headrace.policies.engine import EngineId


class Phase(StrEnum):
    """One step of a wave; journalled before it is taken."""

    PROBE = "probe"
    """Is the engine there?"""
    FORM = "form"
    """The process group, while the engine still generates."""
    GATE = "gate"
    """Gateways admit nothing more to it."""
    PAUSE = "pause"
    """Running requests are retracted (or aborted)."""
    BEGIN = "begin"
    """The update session opens."""
    BROADCAST = "broadcast"
    """All buckets, the version on the last."""
    END = "end"
    """The update session closes."""
    FLUSH = "flush"
    """No prefix of the old weights survives."""
    VERIFY = "verify"
    """Checksums agree."""
    RESUME = "resume"
    """Requests go on."""
    OPEN = "open"
    """Gateways admit again; aborts asked for meanwhile are sent again."""
    DISBAND = "disband"
    """The process group goes."""


class PushOutcome(StrEnum):
    """What became of an engine."""

    UPDATED = "updated"
    """It runs the new version."""
    QUARANTINED = "quarantined"
    """It failed: out of routing, to be replaced."""
    BEHIND = "behind"
    """It is well and runs its old version: the push ended before its turn."""


class Blame(StrEnum):
    """Whose failure it is."""

    ENGINE = "engine"
    """Its own: no answer, a refusal, a wrong checksum."""
    VICTIM = "victim"
    """Refused because another member of its group went: tried again once."""
    PUSH = "push"
    """The sender died, or the push was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an engine left the push."""

    blame: Blame
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next thing to do, for these engines at once. `attempt` counts groups of this wave from 0."""

    wave: int
    phase: Phase
    engines: tuple[EngineId, ...]
    attempt: int


@dataclass(slots=True, kw_only=True)
class Progress:
    """What was tried with one engine. `gated`, `paused` and `session` are set by the attempt: a lost reply may have
    worked."""

    probed: bool = False
    gated: bool = False
    paused: bool = False
    session: bool = False
    got_bucket: bool = False
    complete: bool = False
    victim_of: int = 0
    failure: Failure | None = None

    @property
    def healthy(self) -> bool:
        return self.failure is None

    @property
    def tainted(self) -> bool:
        return self.failure is not None and self.got_bucket


ORDER = tuple(Phase)
# Who takes part in a phase, from what is known of the engine.
MEMBERS: Mapping[Phase, Callable[[Progress], bool]] = {
    Phase.PROBE: lambda engine: engine.healthy and not engine.probed,
    Phase.FORM: lambda engine: engine.healthy and not engine.complete,
    Phase.GATE: lambda engine: engine.healthy and not engine.gated,
    Phase.PAUSE: lambda engine: engine.healthy and not engine.paused,
    Phase.BEGIN: lambda engine: engine.healthy and not engine.session,
    Phase.BROADCAST: lambda engine: engine.healthy and not engine.complete,
    Phase.END: lambda engine: engine.session and not engine.tainted,
    Phase.FLUSH: lambda engine: engine.healthy and engine.complete,
    Phase.VERIFY: lambda engine: engine.healthy and engine.complete,
    Phase.RESUME: lambda engine: engine.paused and not engine.tainted,
    Phase.OPEN: lambda engine: engine.gated and not engine.tainted,
    Phase.DISBAND: lambda engine: engine.healthy and engine.complete,
}
MARKS: Mapping[Phase, str] = {
    Phase.PROBE: "probed",
    Phase.GATE: "gated",
    Phase.PAUSE: "paused",
    Phase.BEGIN: "session",
}


# Out of the session, the pause or the gate again: a second way out is not needed.
LEFT: Mapping[Phase, str] = {Phase.END: "session", Phase.RESUME: "paused", Phase.OPEN: "gated"}


class PushMachine:
    """`while (step := machine.next()): ...; machine.done(step, failures)`."""

    def __init__(self, waves: Sequence[Sequence[EngineId]], in_doubt: Container[EngineId] = ()) -> None:
        """`in_doubt` are engines that may hold mixed weights already: they serve with all of the new ones, or not at
        all."""
        self.waves = tuple(tuple(wave) for wave in waves)
        self.progress = {
            engine_id: Progress(got_bucket=engine_id in in_doubt) for wave in self.waves for engine_id in wave
        }
        self._wave = 0
        self._index = 0
        self._attempt = 0

    def next(self) -> Step | None:
        """The next step, marked as tried; None at the end."""
        while self._wave < len(self.waves):
            while self._index < len(ORDER):
                phase = ORDER[self._index]
                members = tuple(item for item in self.waves[self._wave] if MEMBERS[phase](self.progress[item]))
                if members:
                    self._mark(phase, members)
                    return Step(wave=self._wave, phase=phase, engines=members, attempt=self._attempt)
                self._index += 1
            self._wave, self._index, self._attempt = self._wave + 1, 0, 0
        return None

    def touched(self, engine_id: EngineId) -> None:
        """A bucket is on its way to this engine."""
        self.progress[engine_id].got_bucket = True

    def done(self, step: Step, failures: Mapping[EngineId, Failure]) -> None:
        """What became of a step; engines without a failure succeeded."""
        for engine_id in step.engines:
            self._settle(step.phase, self.progress[engine_id], failures.get(engine_id))
        self._index += 1
        before_broadcast = step.phase in (Phase.GATE, Phase.PAUSE, Phase.BEGIN)
        if failures and (step.phase in (Phase.FORM, Phase.BROADCAST) or before_broadcast):
            # The group has lost a member: it is discarded, and those that are left form another.
            self._attempt += 1
            self._index = ORDER.index(Phase.FORM)

    def abandon(self, message: str) -> None:
        """The push ends here: what is not complete fails, and only the way out of gate, pause and session remains."""
        for progress in self.progress.values():
            if progress.healthy and not progress.complete:
                progress.failure = Failure(blame=Blame.PUSH, message=message)

    def condemn(self, engine_id: EngineId, message: str) -> None:
        """It turns out, after its wave, that it has other weights than the others."""
        progress = self.progress[engine_id]
        progress.failure = progress.failure or Failure(blame=Blame.ENGINE, message=message)

    def outcome(self, engine_id: EngineId) -> PushOutcome:
        progress = self.progress[engine_id]
        if progress.failure is None:
            return PushOutcome.UPDATED if progress.complete else PushOutcome.BEHIND
        if progress.failure.blame is Blame.PUSH and not progress.tainted:
            return PushOutcome.BEHIND
        return PushOutcome.QUARANTINED

    def _mark(self, phase: Phase, members: Sequence[EngineId]) -> None:
        if phase in MARKS:
            for engine_id in members:
                setattr(self.progress[engine_id], MARKS[phase], True)

    def _settle(self, phase: Phase, progress: Progress, failure: Failure | None) -> None:
        if failure is None:
            progress.complete = progress.complete or (phase is Phase.BROADCAST and progress.healthy)
            for left, mark in LEFT.items():
                if phase is left:
                    setattr(progress, mark, False)
            return
        if failure.blame is Blame.VICTIM and progress.victim_of == 0:
            progress.victim_of = 1
            return
        progress.failure = progress.failure or failure
