"""A learner that is the user's own trainer: a program outside of headrace that asks for orders over the control API.

The trainer asks with the version whose weights it holds, and gets one order: load a state, train a batch, save a
state, wait, or end.

Invariants:
- The newest question holds the lease of a batch: whoever asked before can no longer commit it.
- A trainer that does not hold the current version gets no batch. If nothing was trained since the last checkpoint, it
  is told to load that; otherwise what was trained since then is lost (`TrainerStateLost`), as with a learner that died.
- An answer to `commit` means that the step is in the ledger.
- Weights are read below the snapshot folder only, without following links, and belong to the model of the run. They are
  those of the current version, and come before the next question.
- A checkpoint has all files of the directory that the trainer saved, so that its own state (such as that of the
  optimizer) belongs to exactly these weights, and what the model directory describes (config, tokenizer) if it is
  missing there.
"""

from __future__ import annotations

import asyncio
import math
import re
import shutil
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from headrace.buffer.types import CheckpointRef, StepReport
from headrace.buffer.versions import PolicyVersion
from headrace.policies.errors import (
    BatchReleased,
    LearnerNotOpen,
    LeaseLost,
    ModelInvalid,
    RowUnusable,
    TrainerRefused,
    TrainerStateLost,
)
from headrace.policies.learner import LearnerState, WeightsShard, WeightsSnapshot
from headrace.policies.learners.checkpoint_retention import remove_old
from headrace.policies.learners.checkpoints import (
    Manifest,
    SteppedBatch,
    fold_chain,
    publish,
    stage,
    trained_model,
    write_manifest,
)
from headrace.policies.models.model_files import INDEX, weight_files
from headrace.policies.push.compatibility import check_fits
from headrace.policies.push.directories import DESCRIPTION_SUFFIXES
from headrace.policies.push.tensors import read_specs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from headrace.buffer.types import Batch, RolloutId
    from headrace.policies.learners.config import LearnerConfig

_VERSION: Final = re.compile(r"\d+\.\d+")
KEPT_WEIGHTS: Final = 2
"""Number of directories of named weights that are kept: the one being pushed and the one before it."""


class Order(StrEnum):
    """What the trainer has to do next."""

    LOAD = "load"
    """Load the state of `directory` (the model, or a checkpoint with all files that were saved), which is `version`."""
    TRAIN = "train"
    """Train `batch`, write the weights to `directory`, and commit with `lease`."""
    SAVE = "save"
    """Write weights and all other state of `version` to `directory`, and name it as weights."""
    WAIT = "wait"
    """Nothing to do yet: ask again."""
    END = "end"
    """No batch follows: the run has done its steps, or is drained."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerOrder:
    """Answer to a trainer's question."""

    order: Order
    version: PolicyVersion | None = None
    directory: Path | None = None
    lease: str = ""
    batch: Batch | None = None


@dataclass(slots=True, kw_only=True)
class _Handed:
    """A batch, and who trains it. `result` is set by a commit or a release."""

    batch: Batch
    result: asyncio.Future[StepReport]
    lease: str = ""


@dataclass(slots=True)
class _Weights:
    """What is known of the current version's weights: where they are, whether the trainer has pushed them itself, and
    whether it asked for its next order without having named any."""

    directory: Path | None = None
    are_pushed: bool = False
    were_passed_over: bool = False

    @property
    def are_known(self) -> bool:
        return self.directory is not None or self.are_pushed or self.were_passed_over


@dataclass(slots=True)
class _Committed:
    """The last commit, for its repetition."""

    lease: str = ""
    report: StepReport | None = None
    durable: asyncio.Event = field(default_factory=asyncio.Event)


class ExternalLearner:
    """Implementation of `learner.Learner` for one trainer; `take`, `commit`, `release` and `weights` are the trainer's
    side of it."""

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config
        self._version: PolicyVersion | None = None
        self._loadable: Path | None = None
        self._loadable_version: PolicyVersion | None = None
        self._named: list[PolicyVersion] = []
        self._previous_chain = ""
        self._stepped: list[SteppedBatch] = []
        self._handed: _Handed | None = None
        self._saving: asyncio.Future[Path] | None = None
        self._weights = _Weights()
        self._committed = _Committed()
        self._asking = 0
        self._has_ended = False
        self._moved = asyncio.Event()

    # The learner loop's side.

    async def open(self, resume: CheckpointRef | None, *, epoch: int) -> LearnerState:
        """See `Learner.open`."""
        from pathlib import Path

        parent = resume.version if resume else None
        step = parent.step if parent else 0
        self._version = PolicyVersion(epoch, step)
        self._loadable = Path(resume.path) if resume else self._config.model_dir
        self._loadable_version = self._version
        self._weights = _Weights(directory=self._loadable)
        self._previous_chain, self._stepped = resume.chain if resume else "", []
        self._tell()
        return LearnerState(parent=parent, step=step, chain=self._previous_chain)

    async def wanted(self, timeout_s: float) -> bool:
        """Return whether a trainer with the current version is asking for an order, within `timeout_s`."""
        return await self._until(lambda: self._asking > 0, timeout_s)

    async def step(self, batch: Batch) -> StepReport:
        """See `Learner.step`: hand the batch to the trainer and wait for its commit. Raises LearnerNotOpen,
        BatchReleased, and RowUnusable if the trainer gives the batch back with a reason."""
        self._opened()
        self._handed = _Handed(batch=batch, result=asyncio.get_running_loop().create_future())
        self._tell()
        try:
            return await self._handed.result
        finally:
            self._handed = None

    def durable(self) -> None:
        """Answer the commit of the last step: it is in the ledger."""
        self._committed.durable.set()

    async def snapshot(self) -> WeightsSnapshot | None:
        """See `Learner.snapshot`. Waits until the trainer has named the weights of the current version, and returns
        None if it asked for its next order instead. Without files if it has pushed them itself."""
        version = self._opened()
        await self._until(lambda: self._weights.are_known, math.inf)
        if (directory := self._weights.directory) is None:
            return WeightsSnapshot(version=version) if self._weights.are_pushed else None
        files = weight_files(directory)
        shards = await asyncio.to_thread(lambda: tuple(WeightsShard.of(file) for file in files))
        return WeightsSnapshot(version=version, shards=shards)

    async def save(self) -> CheckpointRef:
        """See `Learner.save`: let the trainer save its state, and keep all of its files as the checkpoint."""
        version = self._opened()
        self._saving = asyncio.get_running_loop().create_future()
        self._tell()
        try:
            saved = await self._saving
        finally:
            self._saving = None
        manifest = Manifest(
            version=version,
            previous_chain=self._previous_chain,
            chain=fold_chain(self._previous_chain, self._stepped),
            batches=tuple(self._stepped),
            trained=trained_model(self._config.model_dir),
        )
        published = await asyncio.to_thread(self._keep, saved, manifest)
        self._loadable, self._loadable_version = published, version
        self._previous_chain, self._stepped = manifest.chain, []
        batch_ids = tuple(batch.batch_id for batch in manifest.batches)
        return CheckpointRef(path=str(published), version=version, batch_ids=batch_ids, chain=manifest.chain)

    async def end(self) -> None:
        """Tell every trainer that no batch follows."""
        self._has_ended = True
        self._tell()

    async def close(self) -> None:
        """See `Learner.close`. Idempotent."""
        await self.end()

    # The trainer's side.

    async def take(self, version: PolicyVersion | None, *, timeout_s: float) -> TrainerOrder:
        """Return the next order of a trainer that holds the weights of `version` (None: no state at all), which waits
        up to `timeout_s` for one. Raises TrainerStateLost if its state was not saved."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        if not await self._until(lambda: self._version is not None, timeout_s):
            return TrainerOrder(order=Order.END if self._has_ended else Order.WAIT)
        current = self._opened()
        if version != current:
            return self._load_or_lose(version)
        if not self._weights.are_known:
            self._weights.were_passed_over = True
        self._asking += 1
        self._tell()
        try:
            await self._until(lambda: self._next_order() is not None, end_s - asyncio.get_running_loop().time())
        finally:
            self._asking -= 1
        order = self._next_order()
        if order is Order.TRAIN and self._handed is not None:
            self._handed.lease = uuid.uuid4().hex
            return TrainerOrder(
                order=order,
                version=current,
                directory=self._folder_of(PolicyVersion(current.epoch, current.step + 1)),
                lease=self._handed.lease,
                batch=self._handed.batch,
            )
        directory = self._folder_of(current) if order is Order.SAVE else None
        return TrainerOrder(order=order or Order.WAIT, version=current, directory=directory)

    async def commit(self, lease: str, metrics: Mapping[str, float], *, skipped: bool) -> PolicyVersion:
        """Record the step on the leased batch, and return the version of the weights after it (the same one if they did
        not change). Returns once the step is in the ledger. Idempotent. Raises LeaseLost."""
        if lease != self._committed.lease:
            self._finish(self._leased(lease), metrics, skipped=skipped)
        committed = self._committed
        await committed.durable.wait()
        assert committed.report is not None
        return committed.report.version

    async def release(self, lease: str, reason: str, refused: Mapping[RolloutId, str]) -> None:
        """Give the batch back untrained: with `refused` rollouts (with the reason for each) they are left out from now
        on; with a `reason` it counts as a failed try; with neither the batch can be trained later. Raises LeaseLost."""
        handed = self._leased(lease)
        if unknown := sorted(refused.keys() - {item.rollout_id for item in handed.batch.items}):
            raise TrainerRefused(f"the batch has no rollout {unknown[0]}: refuse only what the batch contains")
        error: Exception
        if refused:
            error = RowUnusable(f"{len(refused)} rollouts: {next(iter(refused.values()))}", dict(refused))
        elif reason:
            error = RowUnusable(f"the trainer gave the batch back: {reason}")
        else:
            error = BatchReleased("the trainer gave the batch back")
        handed.lease = ""
        handed.result.set_exception(error)
        # Not given to anybody until the learner loop has dealt with it.
        self._handed = None

    async def weights(self, version: PolicyVersion, directory: Path | None) -> None:
        """Take the weights of the current version from a directory, or, if None, take it that the trainer has pushed
        them to the engines itself. Idempotent. Raises LeaseLost for another version, TrainerRefused if they come too
        late or a checkpoint needs files, and ModelInvalid."""
        if version != self._version:
            raise LeaseLost(f"{version} is not the current version, {self._version}: ask for the next order")
        if directory is not None:
            await asyncio.to_thread(self._check, directory)
        if (saving := self._saving) is not None:
            if directory is None:
                raise TrainerRefused("a checkpoint needs files: name the directory with the saved state")
            if not saving.done():
                saving.set_result(directory)
        elif not self._weights.are_known:
            self._weights = _Weights(directory=directory, are_pushed=directory is None)
            self._named = [*self._named[1 - KEPT_WEIGHTS :], version]
        elif self._weights.were_passed_over and self._loadable_version != version:
            raise TrainerRefused(f"the weights of {version} come too late: name them before the next question")
        self._tell()

    def _finish(self, handed: _Handed, metrics: Mapping[str, float], *, skipped: bool) -> None:
        version, batch = self._opened(), handed.batch
        members = tuple((item.rollout_id, item.attempt) for item in batch.items)
        self._stepped.append(SteppedBatch(batch_id=batch.lease.batch_id, members=members, skipped=skipped))
        if not skipped:
            self._version = version = PolicyVersion(version.epoch, version.step + 1)
            self._weights = _Weights()
        report = StepReport(
            batch_id=batch.lease.batch_id, version=version, skipped=skipped, metrics=_means(batch) | dict(metrics)
        )
        self._committed = _Committed(handed.lease, report)
        handed.result.set_result(report)
        self._handed = None

    def _load_or_lose(self, version: PolicyVersion | None) -> TrainerOrder:
        if self._stepped or (self._handed is not None and self._handed.lease):
            held = "no state" if version is None else f"the state of {version}"
            raise TrainerStateLost(
                f"a trainer with {held} asks for a batch, but the run is at {self._version}: the steps since the last "
                "checkpoint are undone"
            )
        return TrainerOrder(order=Order.LOAD, version=self._version, directory=self._loadable)

    def _next_order(self) -> Order | None:
        if self._saving is not None and not self._saving.done():
            return Order.SAVE
        if self._handed is not None:
            return Order.TRAIN
        return Order.END if self._has_ended else None

    def _leased(self, lease: str) -> _Handed:
        handed = self._handed
        if handed is None or not lease or lease != handed.lease:
            raise LeaseLost(
                "the lease of this batch is lost: another trainer asked for it, or the learner began a new epoch. Ask "
                "for the next order without a version, and load what it names"
            )
        return handed

    def _folder_of(self, version: PolicyVersion) -> Path:
        """Return the folder for the weights of a version. Those of older versions that no push needs are removed."""
        root = self._config.snapshot_dir
        root.mkdir(parents=True, exist_ok=True)
        needed = {str(each) for each in (*self._named, self._version, version)}
        for path in root.iterdir():
            if _VERSION.fullmatch(path.name) and path.name not in needed:
                shutil.rmtree(path, ignore_errors=True)
        return root / str(version)

    def _check(self, directory: Path) -> None:
        """Raise ModelInvalid if a directory is not below the snapshot folder, has links, or does not fit the model."""
        root = self._config.snapshot_dir.resolve()
        if not directory.is_dir() or root not in directory.resolve().parents:
            raise ModelInvalid(f"{directory} is no directory below {root}: write the weights where the order says")
        if links := [path for path in (directory, *directory.rglob("*")) if path.is_symlink()]:
            raise ModelInvalid(f"{links[0]} is a link: write the file itself")
        specs = {name: spec for file in weight_files(directory) for name, spec in read_specs(file).items()}
        check_fits(specs, self._config.model_dir)

    def _keep(self, saved: Path, manifest: Manifest) -> Path:
        root = self._config.checkpoint_dir
        staged = stage(root, manifest.version)
        shutil.copytree(saved, staged, dirs_exist_ok=True)
        for file in sorted(self._config.model_dir.iterdir()):
            if file.suffix in DESCRIPTION_SUFFIXES and file.name != INDEX and not (staged / file.name).exists():
                shutil.copy(file, staged)
        write_manifest(staged, manifest)
        published = publish(staged, manifest.version).absolute()
        remove_old(root, newest=self._config.keep_checkpoints)
        return published

    def _opened(self) -> PolicyVersion:
        if self._version is None:
            raise LearnerNotOpen("the learner is not open yet: ask again")
        return self._version

    def _tell(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def _until(self, happened: Callable[[], bool], timeout_s: float) -> bool:
        """Wait for something, up to `timeout_s`, and return whether it has happened."""
        try:
            async with asyncio.timeout(None if math.isinf(timeout_s) else max(0.0, timeout_s)):
                while not happened():
                    await self._moved.wait()
        except TimeoutError:
            return happened()
        return True


def _means(batch: Batch) -> dict[str, float]:
    """Return the metrics that the batch itself gives."""
    return {
        "tokens": float(sum(len(row.tokens_T) for item in batch.items for row in item.trajectory.rows)),
        "mean_reward": sum(item.reward for item in batch.items) / len(batch.items),
        "mean_staleness": sum(item.staleness for item in batch.items) / len(batch.items),
    }
