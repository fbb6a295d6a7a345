"""A learner that is the user's own trainer: a program outside of headrace that asks for orders over the control API.

The trainer asks with the version whose weights it holds, and gets one order: load a state, train a batch, save a
state, wait, or end.

Invariants:
- The newest question gets the order, and with it the lease of a batch: whoever asked before waits in vain, and can no
  longer commit.
- A trainer that does not hold the current version gets no batch. If nothing was trained since the last checkpoint, it
  is told to load that; otherwise what was trained since then is lost (`TrainerStateLost`), as with a learner that died.
- An answer to `commit` means that the step is in the ledger, and an answer to the `weights` of a save that the files
  are copied.
- Weights and saved states are read from the folders of the orders only. Weights are those of the current version, and
  come before the next question.
"""

from __future__ import annotations

import asyncio
import math
import re
import shutil
import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from headrace.buffer.trajectories.types import Batch, CheckpointRef, RolloutId, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
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
    publish,
    read_checkpoint,
    stage,
    trained_model,
    write_manifest,
)
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.learners.progress import LearnerProgress, batch_metrics
from headrace.policies.models.model_files import weight_files
from headrace.policies.push.directories import description_files
from headrace.policies.push.fitting import check_fits, read_model_specs, untrained_prefixes

KEPT_WEIGHTS: Final = 2
"""Number of directories of named weights that are kept: the one being pushed and the one before it."""
STATE_SUFFIX: Final = "-state"
_FOLDER: Final = re.compile(rf"\d+\.\d+({STATE_SUFFIX})?")


class TrainerAction(StrEnum):
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

    order: TrainerAction
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
        self._folders = TrainerFolders(config)
        self._progress: LearnerProgress | None = None
        self._loadable: Path | None = None
        self._saved: PolicyVersion | None = None
        self._named: list[PolicyVersion] = []
        self._handed: _Handed | None = None
        self._saving: asyncio.Future[Path] | None = None
        self._copying = asyncio.Lock()
        self._weights = _Weights()
        self._committed = _Committed()
        self._released = ""
        self._asking, self._question = 0, 0
        self._has_ended = False
        self._moved = asyncio.Event()

    # The learner loop's side.

    @property
    def has_unsaved(self) -> bool:
        """Whether steps have been made since the last checkpoint."""
        return self._progress is not None and self._progress.has_unsaved

    @property
    def _version(self) -> PolicyVersion | None:
        return None if self._progress is None else self._progress.version

    async def open(self, resume: CheckpointRef | None, *, epoch: int) -> LearnerState:
        """See `Learner.open`."""
        limit = self._config.max_skipped_in_a_row
        progress = self._progress = LearnerProgress(resume, epoch=epoch, max_skipped_in_a_row=limit)
        self._saved = progress.version
        self._loadable = Path(resume.path) if resume else self._config.model_dir
        self._weights = _Weights(directory=self._loadable)
        self._folders.root.mkdir(parents=True, exist_ok=True)
        self._tell()
        return progress.state

    async def wanted(self, timeout_s: float) -> bool:
        """Return whether a trainer with the current version is asking for an order, within `timeout_s`."""
        return await self._until(lambda: self._asking > 0, timeout_s)

    async def named(self) -> None:
        """Wait until the trainer has named the weights of the current version, or asked for its next order instead."""
        await self._until(lambda: self._weights.are_known, math.inf)

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
        """See `Learner.snapshot`. Returns None if the trainer named no weights of the current version. Without files
        if it has pushed them itself."""
        version = self._opened().version
        await self.named()
        if (directory := self._weights.directory) is None:
            return WeightsSnapshot(version=version) if self._weights.are_pushed else None
        await asyncio.to_thread(self._folders.remove_old, {*self._named, version})
        files = weight_files(directory)
        shards = await asyncio.to_thread(lambda: tuple(WeightsShard.of(file) for file in files))
        untrained = await asyncio.to_thread(self._folders.untrained, directory)
        return WeightsSnapshot(version=version, shards=shards, untrained=untrained)

    async def save(self, configuration: Mapping[str, Any] | None = None) -> CheckpointRef:
        """See `Learner.save`: let the trainer save its state, and keep all of its files as the checkpoint."""
        progress = self._opened()
        self._saving = asyncio.get_running_loop().create_future()
        self._tell()
        try:
            staged = await self._saving
        finally:
            self._saving = None
        manifest = progress.manifest(trained=trained_model(self._config.model_dir), configuration=configuration)
        published = await asyncio.to_thread(self._folders.publish, staged, manifest)
        progress.saved()
        self._loadable, self._saved = published, progress.version
        return read_checkpoint(published)

    def end(self) -> None:
        """Tell every trainer that no batch follows."""
        self._has_ended = True
        self._tell()

    async def close(self) -> None:
        """See `Learner.close`. Trainers that are asking are told to ask again. Idempotent."""
        self._progress = None
        self._tell()

    # The trainer's side.

    async def take(self, version: PolicyVersion | None, *, timeout_s: float) -> TrainerOrder:
        """Return the next order of a trainer that holds the weights of `version` (None: no state at all), which waits
        up to `timeout_s` for one. Raises TrainerStateLost if its state was not saved."""
        end_s = asyncio.get_running_loop().time() + timeout_s
        if not await self._until(lambda: self._version is not None, timeout_s):
            return TrainerOrder(order=TrainerAction.WAIT)
        if version != self._version:
            return self._load_or_lose(version)
        if not self._weights.are_known:
            self._weights.were_passed_over = True
        self._question = mine = self._question + 1
        self._asking += 1
        self._tell()
        try:
            await self._until(
                lambda: (
                    self._next_order() is not TrainerAction.WAIT or self._question != mine or version != self._version
                ),
                end_s - asyncio.get_running_loop().time(),
            )
        finally:
            self._asking -= 1
        if self._question != mine or version != self._version:
            return TrainerOrder(order=TrainerAction.WAIT, version=self._version)
        order, current = self._next_order(), self._opened().version
        if order is TrainerAction.SAVE:
            return TrainerOrder(order=order, version=current, directory=self._folders.of_state(current))
        if order is TrainerAction.TRAIN and self._handed is not None:
            self._handed.lease = uuid.uuid4().hex
            return TrainerOrder(
                order=order,
                version=current,
                directory=self._folders.of_weights(PolicyVersion(current.epoch, current.step + 1)),
                lease=self._handed.lease,
                batch=self._handed.batch,
            )
        return TrainerOrder(order=order, version=current)

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
        on; with a `reason` it counts as a failed try; with neither the batch can be trained later. Idempotent. Raises
        LeaseLost, TrainerRefused."""
        if lease and lease == self._released:
            return
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
        self._released = lease
        handed.result.set_exception(error)
        # Not given to anybody until the learner loop has dealt with it.
        self._handed = None

    async def weights(self, version: PolicyVersion, directory: Path | None) -> None:
        """Take the weights of the current version from the folder of their order, or, if None, take it that the trainer
        has pushed them to the engines itself; or take what it saved. Idempotent. Raises LeaseLost for another version,
        TrainerRefused if they come too late or cannot be copied, and ModelInvalid."""
        self._refuse_other(version)
        if directory == self._folders.of_state(version):
            return await self._take_saved(version, directory)
        if directory not in (None, self._folders.of_weights(version)):
            raise ModelInvalid(f"{directory} is not the folder of the order: write the weights where it says")
        known = self._weights
        if directory is not None:
            await asyncio.to_thread(self._folders.check, directory)
        self._refuse_other(version)
        if self._weights is not known:
            return None
        if known.were_passed_over:
            raise TrainerRefused(f"the weights of {version} come too late: name them before the next question")
        if not known.are_known:
            known.directory, known.are_pushed = directory, directory is None
            self._named = [*self._named[1 - KEPT_WEIGHTS :], version]
            self._tell()
        return None

    async def _take_saved(self, version: PolicyVersion, directory: Path) -> None:
        """Copy what the trainer saved, and answer the save."""
        async with self._copying:
            self._refuse_other(version)
            if version == self._saved:
                return
            if (saving := self._saving) is None:
                raise TrainerRefused(f"{version} is not to be saved: ask for the next order")
            if saving.done():
                return
            await asyncio.to_thread(self._folders.check, directory)
            try:
                staged = await asyncio.to_thread(self._folders.stage, version)
            except (OSError, shutil.Error) as error:
                raise TrainerRefused(f"{directory} cannot be copied: {error}") from error
            if not saving.done():
                saving.set_result(staged)

    def _finish(self, handed: _Handed, metrics: Mapping[str, float], *, skipped: bool) -> None:
        batch = handed.batch
        version = self._opened().stepped(batch, skipped=skipped)
        if not skipped:
            self._weights = _Weights()
        found = batch_metrics(batch) | dict(metrics)
        report = StepReport(batch_id=batch.lease.batch_id, version=version, skipped=skipped, metrics=found)
        self._committed = _Committed(handed.lease, report)
        handed.result.set_result(report)
        self._handed = None
        self._tell()

    def _load_or_lose(self, version: PolicyVersion | None) -> TrainerOrder:
        if self.has_unsaved:
            held = "no state" if version is None else f"the state of {version}"
            raise TrainerStateLost(
                f"a trainer with {held} asks for a batch, but the run is at {self._version}: the steps since the last "
                "checkpoint are undone"
            )
        if self._handed is not None:
            # Whoever had it can no longer commit it.
            self._handed.lease = ""
        return TrainerOrder(order=TrainerAction.LOAD, version=self._version, directory=self._loadable)

    def _next_order(self) -> TrainerAction:
        if self._saving is not None and not self._saving.done():
            return TrainerAction.SAVE
        if self._handed is not None:
            return TrainerAction.TRAIN
        return TrainerAction.END if self._has_ended else TrainerAction.WAIT

    def _leased(self, lease: str) -> _Handed:
        handed = self._handed
        if handed is None or not lease or lease != handed.lease:
            raise LeaseLost(
                "the lease of this batch is lost: another trainer asked for it, or the learner began a new epoch. Ask "
                "for the next order without a version, and load what it names"
            )
        return handed

    def _refuse_other(self, version: PolicyVersion) -> None:
        if version != self._version:
            raise LeaseLost(f"{version} is not the current version, {self._version}: ask for the next order")

    def _opened(self) -> LearnerProgress:
        if self._progress is None:
            raise LearnerNotOpen("the learner is not open yet: ask again")
        return self._progress

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


class TrainerFolders:
    """Folders of one run's trainer, below `root`, and the checkpoints that are made of them. All calls block. Weights
    and a state of one version have two folders: the state is written while engines may be reading the weights. A
    checkpoint has all files that the trainer saved, so that its own state (such as the optimizer's) belongs to exactly
    these weights, and what describes the model (config, tokenizer) if it is missing there."""

    def __init__(self, config: LearnerConfig) -> None:
        self._config = config
        self.root = config.snapshot_dir

    def of_weights(self, version: PolicyVersion) -> Path:
        return self.root / str(version)

    def of_state(self, version: PolicyVersion) -> Path:
        return self.root / f"{version}{STATE_SUFFIX}"

    def remove_old(self, needed: Collection[PolicyVersion]) -> None:
        """Remove the folders of all versions but those that are needed."""
        kept = {path.name for version in needed for path in (self.of_weights(version), self.of_state(version))}
        for path in self.root.iterdir():
            if _FOLDER.fullmatch(path.name) and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def check(self, directory: Path) -> None:
        """Raise ModelInvalid if a directory is none, has links, or does not fit the model."""
        if directory.is_symlink() or not directory.is_dir():
            raise ModelInvalid(f"{directory} is no directory: write the files there before you name it")
        if links := [path for path in directory.rglob("*") if path.is_symlink()]:
            raise ModelInvalid(f"{links[0]} is a link: write the file itself")
        check_fits(read_model_specs(directory), self._config.model_dir, untrained=self.untrained(directory))

    def untrained(self, directory: Path) -> tuple[str, ...]:
        """Return the prefixes of the model's parameters that the trainer leaves out of its weights."""
        return untrained_prefixes(read_model_specs(directory).keys(), self._config.model_dir)

    def stage(self, version: PolicyVersion) -> Path:
        """Copy a saved state to a staged checkpoint, and return it. Raises OSError, shutil.Error."""
        staged = stage(self._config.checkpoint_dir, version)
        shutil.copytree(self.of_state(version), staged, dirs_exist_ok=True, symlinks=True)
        if links := [path for path in staged.rglob("*") if path.is_symlink()]:
            raise OSError(f"{links[0].name} is a link")
        for file in description_files(self._config.model_dir):
            if not (staged / file.name).exists():
                shutil.copy(file, staged)
        return staged

    def publish(self, staged: Path, manifest: Manifest) -> Path:
        """Make a staged checkpoint complete, and return it. What it was copied from is removed."""
        write_manifest(staged, manifest)
        published = publish(staged, manifest.version).absolute()
        shutil.rmtree(self.of_state(manifest.version), ignore_errors=True)
        remove_old(self._config.checkpoint_dir, newest=self._config.keep_checkpoints)
        return published
