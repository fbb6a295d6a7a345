"""Engines and a learner that take time instead of computing: for virtual time, tuning, replays and fault tests.

Invariants:
- Time comes from the running event loop alone, and there is no chance here: under a virtual-time loop a history
  repeats.
- A token carries the version that was served when its share of the turn's time was over; while engines are paused
  no time of a turn passes.
- The learner's checkpoints are those of `checkpoints`, without weights: `ledger verify` takes them as witnesses.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict, Field

from headrace.buffer.types import CheckpointRef, StepReport, VersionSpan
from headrace.buffer.versions import PolicyVersion
from headrace.policies.engine import Completion, FinishReason
from headrace.policies.errors import EngineDown
from headrace.policies.learner import LearnerState, WeightsShard, WeightsSnapshot
from headrace.policies.learner_errors import LearnerNotOpen
from headrace.policies.learners.checkpoints import Manifest, SteppedBatch, fold_chain, publish, stage, write_manifest

if TYPE_CHECKING:
    from headrace.buffer.types import Batch

LOGPROB: Final = -1.0
"""Of every simulated token."""
VOCABULARY: Final = 50_000
RESOLUTION_S: Final = 1e-3
"""A turn that lacks less than this is over. The timers of uvloop, under Ray, count in milliseconds: to wait again and
again for what their rounding leaves would be a busy loop."""
NOWHERE: Final = Path(os.devnull)


class PushMode(StrEnum):
    """What becomes of generation while weights are pushed."""

    OVERLAP = "overlap"
    """It goes on; what is sampled after the push is the new version's."""
    PAUSE = "pause"
    """All turns stop for the time of the push."""
    DRAIN = "drain"
    """No rollout begins until those in flight have ended and the push is over."""


class SimulatedEnginesConfig(BaseModel):
    """How weights reach simulated engines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    push: PushMode = PushMode.OVERLAP
    """`overlap`: generation goes on through a push; `pause`: all turns stop meanwhile; `drain`: rollouts in flight end
    first, and none begins until the push is over."""
    push_s: float = Field(default=10.0, ge=0)
    """Time of one push."""
    gate_wait_s: float = Field(default=20.0, gt=0)
    """How long a turn waits for engines that are down, before it fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What engines do from a moment on. `number` grows with every change; `version` is None before the first push."""

    number: int = 0
    version: PolicyVersion | None = None
    generating: bool = True
    """Whether turns go on."""
    admitting: bool = True
    """Whether rollouts may begin."""
    reachable: bool = True
    """Whether turns may begin; those under way go on."""
    gate_wait_s: float = 20.0
    """How long a turn waits for that."""


class SimulatedEngine:
    """All engines as one process sees them: `tell` it of changes, ask it for turns. Nothing is generated before the
    first version."""

    def __init__(self) -> None:
        self.served = Served()
        self._changed = asyncio.Event()
        self._history: list[tuple[float, Served]] = []
        self.generating = 0
        """Turns under way."""
        self.turns = 0
        """Turns that ended."""
        self.generated_s = 0.0
        """Time of all turns that ended, without their pauses."""

    def tell(self, served: Served) -> None:
        """This holds from now on."""
        if served.number <= self.served.number:
            return
        self.served = served
        self._history.append((asyncio.get_running_loop().time(), served))
        self._changed.set()
        self._changed = asyncio.Event()

    async def admitted(self) -> None:
        """Wait until a rollout may begin."""
        while self.served.version is None or not self.served.admitting:
            await self._changed.wait()

    async def generate(self, tokens: int, seconds: float, *, first_id: int = 0) -> Completion:
        """One turn: `tokens` tokens in `seconds` of generation, counting up from `first_id`. Raises EngineDown."""
        while self.served.version is None:
            await self._changed.wait()
        if not self.served.reachable:
            await self._reached()
        # What held when the turn began, and what came since.
        began, since = asyncio.get_running_loop().time(), len(self._history) - 1
        self.generating += 1
        left_s = seconds
        try:
            while left_s > RESOLUTION_S:
                if self.served.generating:
                    await asyncio.sleep(left_s)
                else:
                    await self._changed.wait()
                left_s = seconds - self._worked(began, since)
        finally:
            self.generating -= 1
        self.turns += 1
        self.generated_s += seconds
        return _completion(tokens, self._spans(tokens, seconds, began, since), first_id)

    async def _reached(self) -> None:
        """Wait for engines that are down, as a gateway does."""
        try:
            async with asyncio.timeout(self.served.gate_wait_s):
                while not self.served.reachable:
                    await self._changed.wait()
        except TimeoutError:
            raise EngineDown(f"the simulated engines were down for {self.served.gate_wait_s:g} s") from None

    def _worked(self, began: float, since: int) -> float:
        """Seconds that passed while engines generated."""
        if since == len(self._history) - 1:
            return asyncio.get_running_loop().time() - began if self.served.generating else 0.0
        return sum(end - start for start, end, served in self._stretches(began, since) if served.generating)

    def _stretches(self, began: float, since: int) -> list[tuple[float, float, Served]]:
        """From the beginning of a turn until now: what held from when to when."""
        changes = self._history[since:]
        starts = [max(began, start) for start, _ in changes]
        ends = [*starts[1:], asyncio.get_running_loop().time()]
        return [(start, end, served) for start, end, (_, served) in zip(starts, ends, changes, strict=True)]

    def _spans(self, tokens: int, seconds: float, began: float, since: int) -> tuple[VersionSpan, ...]:
        """Tokens in equal shares of the time, each the version's that was served at its end."""
        if tokens and since == len(self._history) - 1 and self.served.version is not None:
            return (VersionSpan(start=0, end=tokens, version=self.served.version),)
        spans: list[VersionSpan] = []
        worked_s, start = 0.0, 0
        stretches = self._stretches(began, since)
        for index, (began_s, ended_s, served) in enumerate(stretches):
            worked_s += (ended_s - began_s) * served.generating
            last = index == len(stretches) - 1
            end = tokens if last or not seconds else min(tokens, int(tokens * worked_s / seconds))
            if end > start and served.version is not None:
                if spans and spans[-1].version == served.version:
                    spans[-1] = VersionSpan(start=spans[-1].start, end=end, version=served.version)
                else:
                    spans.append(VersionSpan(start=start, end=end, version=served.version))
                start = end
        return tuple(spans)


def _completion(tokens: int, spans: tuple[VersionSpan, ...], first_id: int) -> Completion:
    return Completion(
        output_ids=tuple([position % VOCABULARY for position in range(first_id, first_id + tokens)]),
        logprobs=(LOGPROB,) * tokens,
        spans=spans,
        finish=FinishReason.STOP,
        text="",
        prompt_tokens=0,
        cached_tokens=0,
        retractions=0,
    )


class SimulatedLearnerConfig(BaseModel):
    """How long a simulated learner takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_s: float = Field(default=240.0, ge=0)
    """Time of one step."""
    save_s: float = Field(default=0.0, ge=0)
    """Time of one checkpoint."""
    seed: int = 0
    """Set by the run; a simulated step has no chance in it."""
    hang_at_step: int | None = Field(default=None, ge=1)
    """The step with this number never ends, once in a run directory: for trying the watchdog."""
    hangs_again: bool = False
    """It never ends, however often a new learner tries it."""
    weights: Path | None = None
    """Weights (safetensors) that real engines are pushed under every version; set by the run. None: the engines are
    simulated too."""
    checkpoint_dir: Path | None = None
    """Where checkpoints (without weights) are written; set by the run. None keeps them in memory."""


class SimulatedLearner:
    """Satisfies `learner.Learner`."""

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
        """Takes `step_s`. Raises LearnerNotOpen."""
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
        """The same weights under every version, or none but their name. Raises LearnerNotOpen."""
        version = self._opened()
        if self._config.weights is not None:
            return WeightsSnapshot(version=version, shards=(WeightsShard.of(self._config.weights),))
        digest = hashlib.sha256(f"simulated {version}".encode()).hexdigest()
        return WeightsSnapshot(version=version, shards=(WeightsShard(path=NOWHERE, sha256=digest),))

    async def save(self) -> CheckpointRef:
        """Takes `save_s`. Raises LearnerNotOpen."""
        version = self._opened()
        await asyncio.sleep(self._config.save_s)
        manifest = Manifest(
            version=version,
            previous_chain=self._previous_chain,
            chain=fold_chain(self._previous_chain, self._stepped),
            batches=tuple(self._stepped),
        )
        path = self._write(manifest)
        self._previous_chain, self._stepped = manifest.chain, []
        batch_ids = tuple(batch.batch_id for batch in manifest.batches)
        return CheckpointRef(path=path, version=version, batch_ids=batch_ids, chain=manifest.chain)

    async def close(self) -> None:
        """Idempotent."""
        self._version = None

    def _hangs(self) -> bool:
        """True once in a run directory, unless it hangs again; always where there is none."""
        root = self._config.checkpoint_dir
        if root is None or self._config.hangs_again:
            return True
        hung = root.with_name("learner-hung")
        if hung.exists():
            return False
        hung.parent.mkdir(parents=True, exist_ok=True)
        hung.touch()
        return True

    def _write(self, manifest: Manifest) -> str:
        """The path of the checkpoint; a name where there is no directory."""
        root = self._config.checkpoint_dir
        if root is None:
            return f"memory/{manifest.version}"
        staged = stage(root, manifest.version)
        write_manifest(staged, manifest)
        return str(publish(staged, manifest.version).absolute())

    def _opened(self) -> PolicyVersion:
        if self._version is None:
            raise LearnerNotOpen("call open first; after close the learner has no model")
        return self._version
