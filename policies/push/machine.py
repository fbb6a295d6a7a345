"""State machine of a weight push through waves of engines. Pure: no clock, no I/O.

Invariants:
- Phases of a wave: probe, pull, form, gate, pause, begin, broadcast, end, flush, verify, resume, open, disband. Nothing
  is broadcast before every engine of the group has answered `begin`; after a loss a new group is formed first.
- Without process groups (`GROUP_PHASES` are skipped) each engine takes the weights by itself in `broadcast`, and its
  failure does not affect the others of its wave.
- An engine that got a bucket and then failed is tainted: it may hold mixed weights, and is neither resumed nor opened.
- For every other engine the session is always closed, the pause ended and the gate opened.
- Waves follow one another. A failed engine never stops the others; a dead sender stops the push.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.policies.engine import EngineId


class Phase(StrEnum):
    """Phase of a wave, journalled before it begins."""

    PROBE = "probe"
    """Ask the engine for its info."""
    PULL = "pull"
    """Have the engine's host apply a delta to its copy of the model, while the engine still generates."""
    FORM = "form"
    """Form the process group, while the engine still generates."""
    GATE = "gate"
    """Stop admission at the gateways."""
    PAUSE = "pause"
    """Pause the engine: retract or abort its requests, or keep them in place."""
    BEGIN = "begin"
    """Open the update session."""
    BROADCAST = "broadcast"
    """Send all buckets, the last one with the version; or have each engine read the snapshot's directory."""
    END = "end"
    """Close the update session."""
    FLUSH = "flush"
    """Flush cached prefixes of the old weights."""
    VERIFY = "verify"
    """Compare checksums."""
    RESUME = "resume"
    """Resume the requests."""
    OPEN = "open"
    """Resume admission at the gateways, and repeat aborts requested in the meantime."""
    DISBAND = "disband"
    """Leave the process group."""


class PushOutcome(StrEnum):
    """Outcome of a push for one engine."""

    UPDATED = "updated"
    """The engine runs the new version."""
    QUARANTINED = "quarantined"
    """The engine failed: it is out of routing until it is replaced or verified."""
    BEHIND = "behind"
    """The engine is healthy and runs its old version: the push ended before its turn."""


class Blame(StrEnum):
    """Cause of an engine's failure."""

    ENGINE = "engine"
    """The engine itself: no answer, a refusal or a wrong checksum."""
    VICTIM = "victim"
    """The loss of another member of its group; the engine is retried once."""
    PUSH = "push"
    """The push: its sender died, or it was cancelled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure of one engine in a push."""

    blame: Blame
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PushStep:
    """Next phase, which runs concurrently on these engines. `attempt` counts this wave's groups from 0."""

    wave: int
    phase: Phase
    engines: tuple[EngineId, ...]
    attempt: int


@dataclass(slots=True, kw_only=True)
class EngineProgress:
    """Progress of one engine. `gated`, `paused` and `session` are set before the call: the call may have worked even if
    its reply is lost."""

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
# Engines that take part in a phase.
MEMBERS: Mapping[Phase, Callable[[EngineProgress], bool]] = {
    Phase.PROBE: lambda engine: engine.healthy and not engine.probed,
    Phase.PULL: lambda engine: engine.healthy and not engine.complete,
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
MARKS: Mapping[Phase, str] = {Phase.PROBE: "probed", Phase.GATE: "gated", Phase.PAUSE: "paused", Phase.BEGIN: "session"}


GROUP_PHASES = frozenset({Phase.FORM, Phase.BEGIN, Phase.END, Phase.DISBAND})
"""Phases that only a transfer by process groups needs."""

# After these phases succeeded, the engine has left the session, the pause or the closed gate.
LEFT: Mapping[Phase, str] = {Phase.END: "session", Phase.RESUME: "paused", Phase.OPEN: "gated"}


class PushMachine:
    """State machine of one push: `while (step := machine.next()): ...; machine.done(step, failures)`."""

    def __init__(
        self,
        waves: Sequence[Sequence[EngineId]],
        in_doubt: Container[EngineId] = (),
        *,
        skipped: Container[Phase] = (),
    ) -> None:
        """Engines `in_doubt` may already hold mixed weights: they serve only if they get all the new weights. Phases in
        `skipped` do not occur."""
        self._order = tuple(phase for phase in ORDER if phase not in skipped)
        self._grouped = Phase.FORM in self._order
        self.waves = tuple(tuple(wave) for wave in waves)
        self.progress = {
            engine_id: EngineProgress(got_bucket=engine_id in in_doubt) for wave in self.waves for engine_id in wave
        }
        self._wave = 0
        self._index = 0
        self._attempt = 0

    def next(self) -> PushStep | None:
        """Return the next step, marked as attempted; None at the end."""
        while self._wave < len(self.waves):
            while self._index < len(self._order):
                phase = self._order[self._index]
                members = tuple(item for item in self.waves[self._wave] if MEMBERS[phase](self.progress[item]))
                if members:
                    if phase in MARKS:
                        for engine_id in members:
                            setattr(self.progress[engine_id], MARKS[phase], True)
                    return PushStep(wave=self._wave, phase=phase, engines=members, attempt=self._attempt)
                self._index += 1
            self._wave, self._index, self._attempt = self._wave + 1, 0, 0
        return None

    def touched(self, engine_id: EngineId) -> None:
        """Record that a bucket is being sent to this engine."""
        self.progress[engine_id].got_bucket = True

    def done(self, step: PushStep, failures: Mapping[EngineId, Failure]) -> None:
        """Record the end of a step; engines without a failure succeeded."""
        for engine_id in step.engines:
            progress, failure = self.progress[engine_id], failures.get(engine_id)
            if failure is None:
                progress.complete = progress.complete or (step.phase is Phase.BROADCAST and progress.healthy)
                if step.phase in LEFT:
                    setattr(progress, LEFT[step.phase], False)
            elif failure.blame is Blame.VICTIM and progress.victim_of == 0 and self._grouped:
                progress.victim_of = 1
            else:
                progress.failure = progress.failure or failure
        self._index += 1
        before_broadcast = step.phase in (Phase.GATE, Phase.PAUSE, Phase.BEGIN)
        if failures and self._grouped and (step.phase in (Phase.FORM, Phase.BROADCAST) or before_broadcast):
            # The group has lost a member: it is discarded, and the remaining engines form another.
            self._attempt += 1
            self._index = self._order.index(Phase.FORM)

    def abandon(self, message: str) -> None:
        """End the push: engines that have not been updated fail, and only the steps for leaving gates, pauses and
        sessions remain."""
        for progress in self.progress.values():
            if progress.healthy and not progress.complete:
                progress.failure = Failure(blame=Blame.PUSH, message=message)

    def condemn(self, engine_id: EngineId, message: str) -> None:
        """Record that an engine from an earlier wave has different weights from the rest."""
        progress = self.progress[engine_id]
        progress.failure = progress.failure or Failure(blame=Blame.ENGINE, message=message)

    def outcome(self, engine_id: EngineId) -> PushOutcome:
        progress = self.progress[engine_id]
        if progress.failure is None:
            return PushOutcome.UPDATED if progress.complete else PushOutcome.BEHIND
        if progress.failure.blame is Blame.PUSH and not progress.tainted:
            return PushOutcome.BEHIND
        return PushOutcome.QUARANTINED
