"""Simulated engines and learner, which let time pass instead of computing, for virtual time, tuning, replays and fault
tests.

Invariants:
- Time is read only from the running event loop, and only planted slowdowns are drawn, from a seed: with a virtual-time
  loop, a run is reproducible.
- A token carries the version that was being served at the end of its share of the turn's time. A turn's time does not
  advance while engines are paused.
- A turn is queue, prefill and decode, in this order; a session stays on one engine, as with a cache-affine router.
- The learner's checkpoints are those of `checkpoints`, without weights, so that `ledger verify` can use them.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

from pydantic import Field, model_validator

from headrace.buffer.primitives.sections import Section
from headrace.buffer.primitives.slowdowns import Slowdown, Slowdowns, SlowKind, refuse_kinds, refuse_names
from headrace.buffer.trajectories.types import Batch, CheckpointRef, StepReport, VersionSpan
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import Completion, FinishReason
from headrace.policies.errors import EngineDown, LearnerNotOpen
from headrace.policies.learner import LearnerState, WeightsShard, WeightsSnapshot
from headrace.policies.learners.checkpoints import Manifest, SteppedBatch, fold_chain, publish, stage, write_manifest
from headrace.policies.models.model_files import weight_files

LOGPROB: Final = -1.0
"""Log-probability of every simulated token."""
QUEUE_SHARE: Final = 0.05
"""Share of a turn's generation that it waits in the engine's queue."""
PREFILL_SHARE: Final = 0.15
"""Share of a turn's generation until its first token."""
VOCABULARY: Final = 50_000
RESOLUTION_S: Final = 1e-3
"""Remaining time below which a turn is over. Timers of uvloop, which Ray uses, have a resolution of milliseconds:
waiting for a smaller remainder would be a busy loop."""
NOWHERE: Final = Path(os.devnull)


class PushMode(StrEnum):
    """Treatment of generation during a push."""

    OVERLAP = "overlap"
    """Generation continues; tokens sampled after the push have the new version."""
    PAUSE = "pause"
    """All turns stop during the push."""
    DRAIN = "drain"
    """No rollout begins until those in flight have finished and the push is over."""


class SimulatedEnginesConfig(Section):
    """Pushes and failures of simulated engines."""

    push: PushMode = PushMode.OVERLAP
    """Treatment of generation during a push: `overlap` continues it, `pause` stops all turns, and `drain` lets rollouts
    in flight finish first and begins none until the push is over."""
    push_s: float = Field(default=10.0, ge=0)
    """Duration of one push."""
    gate_wait_s: float = Field(default=20.0, gt=0)
    """Maximum time that a turn waits for engines that are down before it fails."""
    engines: int = Field(default=1, ge=1)
    """Number of engines, `engine-0`, `engine-1`, ...; all turns of a session are on one of them."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Planted slowdowns of the kinds `engine`, `retraction` and `gate`."""
    seed: int = 0
    """Random seed of the slowdowns."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the engines."""
        return tuple(f"engine-{number}" for number in range(self.engines))

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        refuse_kinds(self.slowdowns, (SlowKind.ENGINE, SlowKind.RETRACTION, SlowKind.GATE))
        for kind in (SlowKind.ENGINE, SlowKind.RETRACTION):
            refuse_names(self.slowdowns, kind, self.names)
        refuse_names(self.slowdowns, SlowKind.GATE, ())
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """State of the simulated engines. `number` grows with every change; `version` is None before the first push."""

    number: int = 0
    version: PolicyVersion | None = None
    generating: bool = True
    """True if turns continue."""
    admitting: bool = True
    """True if rollouts may begin."""
    reachable: bool = True
    """True if turns may begin; running turns continue."""
    config: SimulatedEnginesConfig = field(default_factory=SimulatedEnginesConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A simulated turn: its completion, its engine, and how long it was held by engines that were closed."""

    completion: Completion
    engine: str
    held_s: float


class SimulatedEngine:
    """All simulated engines, as one process sees them. Nothing is generated before the first version is served."""

    def __init__(self) -> None:
        self.served = Served()
        self._slowdowns = Slowdowns((), seed=0)
        self._changed = asyncio.Event()
        self._history: list[tuple[float, Served]] = []
        self.generating = 0
        """Number of running turns."""
        self.turns = 0
        """Number of turns that have ended."""
        self.generated_s = 0.0
        """Total time of turns that have ended, excluding their pauses."""

    def set_served(self, served: Served) -> None:
        """Change the state of the engines, unless a newer one has been set."""
        if served.number <= self.served.number:
            return
        if served.config != self.served.config:
            self._slowdowns = Slowdowns(served.config.slowdowns, seed=served.config.seed)
        self.served = served
        self._history.append((asyncio.get_running_loop().time(), served))
        self._changed.set()
        self._changed = asyncio.Event()

    async def admitted(self) -> None:
        """Wait until a rollout may begin."""
        while self.served.version is None or not self.served.admitting:
            await self._changed.wait()

    async def generate(self, tokens: int, seconds: float, *, first_id: int = 0, session: str = "") -> Generated:
        """Generate `tokens` tokens, with ids starting at `first_id`, in `seconds` of generation time, or longer on a
        slow engine. Raises EngineDown."""
        now = asyncio.get_running_loop().time
        called_s = now()
        await self._open()
        config = self.served.config
        engine = config.names[zlib.crc32(session.encode()) % config.engines]
        queue_s, prefill_s = seconds * QUEUE_SHARE, seconds * PREFILL_SHARE
        draw = f"{session} {first_id}"
        recomputed = self._slowdowns.factor(SlowKind.RETRACTION, engine, draw)
        slow = self._slowdowns.factor(SlowKind.ENGINE, engine, draw) * recomputed
        seconds += (seconds - queue_s - prefill_s) * (slow - 1)
        # `since` is the index of the state in which the turn began.
        began, since = now(), len(self._history) - 1
        self.generating += 1
        left_s = seconds
        try:
            while left_s > RESOLUTION_S:
                if self.served.generating:
                    await asyncio.sleep(left_s)
                else:
                    await self._changed.wait()
                if since == len(self._history) - 1:
                    worked_s = now() - began if self.served.generating else 0.0
                else:
                    periods = self._periods(began, since)
                    worked_s = sum(end - start for start, end, served in periods if served.generating)
                left_s = seconds - worked_s
        finally:
            self.generating -= 1
        self.turns += 1
        self.generated_s += seconds
        completion = Completion(
            output_ids=tuple([position % VOCABULARY for position in range(first_id, first_id + tokens)]),
            logprobs=(LOGPROB,) * tokens,
            spans=self._spans(tokens, seconds, began, since),
            finish=FinishReason.STOP,
            text="",
            prompt_tokens=0,
            cached_tokens=0,
            retractions=int(recomputed > 1),
            queue_s=queue_s,
            prefill_s=prefill_s,
        )
        return Generated(completion=completion, engine=engine, held_s=max(0.0, now() - called_s - seconds))

    async def _open(self) -> None:
        """Wait until a turn may begin. Raises EngineDown."""
        while self.served.version is None:
            await self._changed.wait()
        if self.served.reachable:
            return
        limit_s = self.served.config.gate_wait_s
        try:
            async with asyncio.timeout(limit_s):
                while not self.served.reachable:
                    await self._changed.wait()
        except TimeoutError:
            raise EngineDown(f"the simulated engines were down for {limit_s:g} s") from None

    def _periods(self, began: float, since: int) -> list[tuple[float, float, Served]]:
        """Return the states since the beginning of a turn, each with its start and end."""
        changes = self._history[since:]
        starts = [max(began, start) for start, _ in changes]
        ends = [*starts[1:], asyncio.get_running_loop().time()]
        return [(start, end, served) for start, end, (_, served) in zip(starts, ends, changes, strict=True)]

    def _spans(self, tokens: int, seconds: float, began: float, since: int) -> tuple[VersionSpan, ...]:
        """Divide a turn's time into equal shares for the tokens; each token has the version being served at the end of
        its share."""
        if tokens and since == len(self._history) - 1 and self.served.version is not None:
            return (VersionSpan(start=0, end=tokens, version=self.served.version),)
        spans: list[VersionSpan] = []
        worked_s, start = 0.0, 0
        periods = self._periods(began, since)
        for index, (began_s, ended_s, served) in enumerate(periods):
            worked_s += (ended_s - began_s) * served.generating
            last = index == len(periods) - 1
            end = tokens if last or not seconds else min(tokens, int(tokens * worked_s / seconds))
            if end > start and served.version is not None:
                if spans and spans[-1].version == served.version:
                    spans[-1] = VersionSpan(start=spans[-1].start, end=end, version=served.version)
                else:
                    spans.append(VersionSpan(start=start, end=end, version=served.version))
                start = end
        return tuple(spans)


class SimulatedLearnerConfig(Section):
    """Durations and failures of a simulated learner."""

    step_s: float = Field(default=240.0, ge=0)
    """Duration of one step."""
    save_s: float = Field(default=0.0, ge=0)
    """Duration of one checkpoint."""
    seed: int = 0
    """Set by the run; unused, because simulated steps are not random."""
    hang_at_step: int | None = Field(default=None, ge=1)
    """Number of the step that hangs, once per run directory, to test the watchdog."""
    hangs_again: bool = False
    """Make that step hang for every new learner."""
    weights: Path | None = None
    """Model directory whose weights are pushed to real engines for every version; set by the run. None if the engines
    are simulated too."""
    checkpoint_dir: Path | None = None
    """Directory for checkpoints (without weights); set by the run. None keeps them in memory."""


class SimulatedLearner:
    """Simulated implementation of `learner.Learner`."""

    def __init__(self, config: SimulatedLearnerConfig) -> None:
        self._config = config
        self._version: PolicyVersion | None = None
        self._previous_chain = ""
        self._stepped: list[SteppedBatch] = []

    async def open(self, resume: CheckpointRef | None, *, epoch: int) -> LearnerState:
        """See `Learner.open`."""
        step = resume.version.step if resume else 0
        self._version = PolicyVersion(epoch, step)
        self._previous_chain = resume.chain if resume else ""
        self._stepped = []
        parent = resume.version if resume else None
        return LearnerState(parent=parent, step=step, chain=self._previous_chain)

    async def step(self, batch: Batch) -> StepReport:
        """See `Learner.step`. Takes `step_s` seconds. Raises LearnerNotOpen."""
        version = self._opened()
        began_s = asyncio.get_running_loop().time()
        if version.step + 1 == self._config.hang_at_step and self._hangs():
            await asyncio.Event().wait()
        await asyncio.sleep(self._config.step_s)
        members = tuple((item.rollout_id, item.attempt) for item in batch.items)
        self._stepped.append(SteppedBatch(batch_id=batch.lease.batch_id, members=members, skipped=False))
        self._version = PolicyVersion(version.epoch, version.step + 1)
        metrics = {
            "tokens": float(sum(len(row.tokens_T) for item in batch.items for row in item.trajectory.rows)),
            "mean_reward": sum(item.reward for item in batch.items) / len(batch.items),
            "mean_staleness": sum(item.staleness for item in batch.items) / len(batch.items),
            "learner_s": asyncio.get_running_loop().time() - began_s,
        }
        return StepReport(batch_id=batch.lease.batch_id, version=self._version, skipped=False, metrics=metrics)

    async def snapshot(self) -> WeightsSnapshot:
        """Return the same weights for every version, or, without real engines, only a name. Raises LearnerNotOpen."""
        version = self._opened()
        if self._config.weights is not None:
            shards = tuple(WeightsShard.of(path) for path in weight_files(self._config.weights))
            return WeightsSnapshot(version=version, shards=shards)
        digest = hashlib.sha256(f"simulated {version}".encode()).hexdigest()
        return WeightsSnapshot(version=version, shards=(WeightsShard(path=NOWHERE, sha256=digest),))

    async def save(self, configuration: Mapping[str, Any] | None = None) -> CheckpointRef:
        """See `Learner.save`. Takes `save_s` seconds. Raises LearnerNotOpen."""
        version = self._opened()
        await asyncio.sleep(self._config.save_s)
        manifest = Manifest(
            version=version,
            previous_chain=self._previous_chain,
            chain=fold_chain(self._previous_chain, self._stepped),
            batches=tuple(self._stepped),
            configuration=configuration or {},
        )
        path, root = f"memory/{version}", self._config.checkpoint_dir
        if root is not None:
            staged = stage(root, version)
            write_manifest(staged, manifest)
            path = str(publish(staged, version).absolute())
        self._previous_chain, self._stepped = manifest.chain, []
        batch_ids = tuple(batch.batch_id for batch in manifest.batches)
        return CheckpointRef(path=path, version=version, batch_ids=batch_ids, chain=manifest.chain)

    async def close(self) -> None:
        """See `Learner.close`. Idempotent."""
        self._version = None

    def _hangs(self) -> bool:
        """Return True if this attempt at `hang_at_step` hangs: always if there is no run directory or `hangs_again` is
        set, otherwise only the first time."""
        root = self._config.checkpoint_dir
        if root is None or self._config.hangs_again:
            return True
        hung = root.with_name("learner-hung")
        if hung.exists():
            return False
        hung.parent.mkdir(parents=True, exist_ok=True)
        hung.touch()
        return True

    def _opened(self) -> PolicyVersion:
        if self._version is None:
            raise LearnerNotOpen("the learner is not open: call open() first (close() unloads the model)")
        return self._version
