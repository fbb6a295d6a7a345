"""slime as a learner: the `Learner` protocol over slime's training processes.

Invariants:
- Nothing of slime's rollout side is used. Weights leave by slime's own updaters (push.transport nccl, delta) or as a
  Hugging Face directory. A transfer that hangs ends the ranks, and the run goes on with the next transport.
- A checkpoint that was loaded without the optimizer's moments is refused, because slime does not report it.
- `close` and the death of this process kill all ranks and free their GPUs.
- Importing this module imports neither torch nor slime.

Layout of a checkpoint: `headrace.json`, `slime/` with slime's torch_dist checkpoint, and the files of the version's
snapshot, so that the directory is a Hugging Face model as well.
"""

from __future__ import annotations

import logging
import math
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from headrace.actors.training.rollout_engine import RolloutEngine
from headrace.actors.training.slime_group import SlimeGroup
from headrace.buffer.primitives.durable_files import link_or_copy
from headrace.buffer.trajectories.types import Batch, CheckpointRef, StepReport
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import CheckpointUnreadable, LearnerNotOpen, RankFailed, SenderFailed
from headrace.policies.learner import WeightsDelta, WeightsDirectory, WeightsSnapshot
from headrace.policies.learners import checkpoints
from headrace.policies.learners.checkpoint_retention import remove_old
from headrace.policies.learners.checkpoints import refuse_mismatch
from headrace.policies.learners.config import row_limits, trained_as
from headrace.policies.learners.logprob_drift import DriftSums
from headrace.policies.learners.one_thread import OneThreadLearner
from headrace.policies.learners.progress import LearnerProgress, batch_metrics
from headrace.policies.learners.slime import batches, checkout, visibility
from headrace.policies.learners.slime.arguments import SlimeTerms
from headrace.policies.learners.slime.transports import Transports
from headrace.policies.push.contract import GroupMember
from headrace.policies.push.fitting import read_model_specs, untrained_prefixes

if TYPE_CHECKING:
    from headrace.actors.training.slime_rank import SlimeRankStep

logger = logging.getLogger(__name__)

SLIME_STATE: Final = "slime"
"""Folder of a checkpoint with slime's own files."""
KEPT_SNAPSHOTS: Final = 2
"""Number of snapshots to keep: the one being pushed and the one just written."""
DELTAS_OF_AN_EPOCH: Final = 1_000_000
"""Highest number of pushes of one incarnation of the learner."""
_STAGED: Final = "tmp-"
_RENAMED: Final = {"pg_clipfrac": "clip_fraction", "entropy_loss": "entropy", "kl_loss": "kl"}
"""slime's names of numbers that headrace's metrics have under other names."""
_NOT_REPORTED: Final = ("train/step", "train/global_batch_size", "train/lr-pg_")


class SlimeLearner(OneThreadLearner):
    """Implementation of `headrace.policies.learner.Learner`."""

    def __init__(self, terms: SlimeTerms) -> None:
        super().__init__(lambda resume, epoch: SlimeTrainer(terms, resume, epoch))

    async def send(self, version: PolicyVersion, work: Callable[[SlimeTrainer], None]) -> None:
        """Do a part of sending these weights. Raises SenderFailed after another step, and RankFailed."""

        def send() -> None:
            if not holds(self, version):
                raise SenderFailed(f"the ranks no longer hold the weights of {version}")
            work(trainer_of(self))

        await self._in_thread(send)


def trainer_of(learner: SlimeLearner) -> SlimeTrainer:
    """Return the blocking part of a learner. Raises LearnerNotOpen."""
    return cast("SlimeTrainer", learner._opened())  # noqa: SLF001 - an actor's public methods are async


def holds(learner: SlimeLearner, version: PolicyVersion) -> bool:
    """Return True if the ranks hold the weights of this version, and send them themselves."""
    try:
        trainer = trainer_of(learner)
    except LearnerNotOpen:
        return False
    return trainer.sends and trainer.progress.version == version


class SlimeTrainer:
    """Training processes, version and hash chain of one learner incarnation; blocking."""

    def __init__(self, terms: SlimeTerms, resume: CheckpointRef | None, epoch: int) -> None:
        """Start the processes, and load the model or the checkpoint. Raises LearnerSettingsInvalid,
        CheckpointUnreadable or RankFailed."""
        self.transports = Transports(terms.learner.snapshot_dir.with_name("push_transport.json"), terms.transport)
        terms = replace(terms, transport=self.transports.current)
        self._terms, self._config = terms, terms.learner
        self._connected: tuple[GroupMember, ...] = ()
        self._full: tuple[int, Path] | None = None
        self.progress = LearnerProgress(resume, epoch=epoch, max_skipped_in_a_row=self._config.max_skipped_in_a_row)
        if resume is not None:
            refuse_mismatch(Path(resume.path), trained_as(self._config))
        checkout.make_importable(*checkout.find_checkouts(terms.learner.slime))
        limits = row_limits(self._config)
        assert limits is not None
        self._limits = limits
        load = self._config.model_dir if resume is None else Path(resume.path) / SLIME_STATE
        if not load.is_dir():
            raise CheckpointUnreadable(f"{load} does not exist: the checkpoint was not written by the slime learner")
        self._scheduled = 0
        self._parallel: dict[str, int] = {}
        self._last_report: StepReport | None = None
        self._last_snapshot: WeightsSnapshot | None = None
        self._last_delta: WeightsSnapshot | None = None
        self._untrained: tuple[str, ...] | None = None
        self.group = SlimeGroup(terms, load)
        try:
            self._check_restored()
            if terms.transport == "delta":
                self._begin_deltas(epoch)
            for folder in (self._config.snapshot_dir, self._config.checkpoint_dir):
                self._check_visible(folder)
        except BaseException:
            self.group.close()
            raise

    def step(self, batch: Batch) -> StepReport:
        """Perform one update. Raises RowUnusable before any change, NonFiniteRun after the last allowed skip."""
        if self._last_report is not None and self._last_report.batch_id == batch.lease.batch_id:
            self.progress.stop_when_diverged()
            return self._last_report
        started = time.perf_counter()
        data = batches.scheduled_data(batch, self._limits, self._config, args=self.group.args, parallel=self._parallel)
        results = self.group.train(self.progress.version.step, data)
        [scheduled] = {result.scheduled for result in results}
        # slime's scheduler counts rollouts, and moves only with the optimizer.
        skipped = scheduled == self._scheduled
        self._scheduled = scheduled
        version = self.progress.stepped(batch, skipped=skipped)
        metrics = batch_metrics(batch) | _slime_metrics(results) | {"seconds": time.perf_counter() - started}
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        drift = sum((result.drift for result in results), DriftSums()).drift()
        self._last_report = StepReport(
            batch_id=batch.lease.batch_id, version=version, skipped=skipped, metrics=finite, drift=drift
        )
        self.progress.stop_when_diverged()
        return self._last_report

    @property
    def sends(self) -> bool:
        """Whether the ranks send their weights themselves."""
        return self.transports.current == "nccl"

    def snapshot(self) -> WeightsSnapshot:
        """Return the weights in the form of the transport, after writing what of them is on disk."""
        version = self.progress.version
        if self.sends:
            return WeightsSnapshot(version=version, live=True)
        if self.transports.current == "disk":
            return self._directory()
        if self._last_delta is None or self._last_delta.version != version:
            self._begin_at_checkpoint()
            [number] = set(self.group.call("update_weights_of_engines"))
            delta = WeightsDelta(source=self._terms.deltas_dir, number=number)
            self._last_delta = WeightsSnapshot(version=version, delta=delta)
        return self._last_delta

    def connect(self, engines: Sequence[GroupMember], group: object, limit_s: float) -> None:
        """Connect the ranks with these engines of an engine group, unless they are. Raises RankFailed."""
        if tuple(engines) != self._connected:
            self._connected = ()
            handles = [RolloutEngine(group, engine.engine_id) for engine in engines]
            self.group.connect_engines(handles, [engine.ranks for engine in engines], limit_s)
            self._connected = tuple(engines)

    def send(self, limit_s: float) -> None:
        """Have slime's updaters send the weights. Raises RankFailed."""
        connected, self._connected = self._connected, ()
        self.group.call_within(limit_s, "update_weights_of_engines")
        # As the engines will describe themselves in the next push.
        self._connected = tuple(replace(engine, holds=self.progress.version) for engine in connected)

    def _begin_deltas(self, epoch: int) -> None:
        """Begin a stream of deltas with the start model, under numbers that no host has applied yet."""
        _withdraw(self._terms.deltas_dir)
        number = epoch * DELTAS_OF_AN_EPOCH
        self.group.call("begin_deltas", number)
        self._publish_full(number, self._config.model_dir)

    def _begin_at_checkpoint(self) -> None:
        """Let hosts without a copy begin at the last checkpoint, whose version is pushed, and remove older deltas."""
        full, self._full = self._full, None
        if full is not None:
            self._publish_full(*full)
            for old in sorted(self._terms.deltas_dir.iterdir())[:-1]:
                _withdraw(old)

    def _publish_full(self, number: int, model: Path) -> None:
        final = self._terms.deltas_dir / f"weight_v{number:06d}"
        staged = final.with_name(f"{_STAGED}{number}")
        staged.mkdir(parents=True)
        for file in model.iterdir():
            if file.is_file():
                link_or_copy(file, staged / file.name)
        _withdraw(final)
        staged.rename(final)

    def _directory(self) -> WeightsSnapshot:
        """Write the weights as a directory, and remove the one before last."""
        version = self.progress.version
        if self._last_snapshot is not None and self._last_snapshot.version == version:
            return self._last_snapshot
        root = self._config.snapshot_dir
        final, staged = root / str(version), root / f"{_STAGED}{version}"
        for leftover in root.glob(f"{_STAGED}*"):
            shutil.rmtree(leftover)
        staged.mkdir(parents=True)
        self.group.call("export", str(staged))
        if final.exists():
            # Only this epoch's learner writes it, before its first step.
            shutil.rmtree(final)
        staged.rename(final)
        digests = self._digests(final, sorted(file.name for file in final.iterdir() if file.is_file()))
        keep_newest_snapshots(root, KEPT_SNAPSHOTS)
        directory = WeightsDirectory(path=final, digests=digests)
        if self._untrained is None:
            self._untrained = untrained_prefixes(read_model_specs(final).keys(), self._config.model_dir)
            if self._untrained:
                logger.warning("slime does not export %s: engines keep their own", ", ".join(self._untrained))
        self._last_snapshot = WeightsSnapshot(version=version, directory=directory, untrained=self._untrained)
        return self._last_snapshot

    def save(self, configuration: Mapping[str, Any] | None = None) -> CheckpointRef:
        """Write the checkpoint of the current version, unless it already exists because only skipped steps have
        followed it."""
        root, version = self._config.checkpoint_dir, self.progress.version
        if (root / str(version)).exists():
            return checkpoints.read_checkpoint(root / str(version))
        staged = checkpoints.stage(root, version)
        folder = staged / SLIME_STATE
        folder.mkdir()
        # Megatron refuses to load an iteration 0.
        self.group.call("save_into", str(folder), version.step + 1)
        names = sorted(str(file.relative_to(staged)) for file in folder.rglob("*") if file.is_file())
        digests = self._digests(staged, names) | self._link_weights(staged)
        manifest = self.progress.manifest(trained=trained_as(self._config), configuration=configuration)
        checkpoints.write_manifest(staged, manifest, digests=digests)
        final = checkpoints.publish(staged, version)
        self.progress.saved()
        if (delta := self._last_delta) is not None and delta.version == version and delta.delta is not None:
            self._full = delta.delta.number, self._config.snapshot_dir / str(version)
        remove_old(root, newest=self._config.keep_checkpoints)
        return checkpoints.read_checkpoint(final)

    def _digests(self, directory: Path, names: Sequence[str]) -> dict[str, str]:
        """Return the SHA-256 of the files, in this order; the ranks share the work."""
        found: dict[str, str] = {}
        for part in self.group.call("digests", str(directory), tuple(names)):
            found |= part
        return {name: found[name] for name in names}

    def _link_weights(self, directory: Path) -> dict[str, str]:
        """Link the files of this version's snapshot into a directory, and return their SHA-256."""
        weights = self._directory().directory
        assert weights is not None
        for name in weights.digests:
            link_or_copy(weights.path / name, directory / name)
        return dict(weights.digests)

    def interrupt(self) -> None:
        """Make a call to the training processes fail."""
        self.group.interrupt()

    def close(self) -> None:
        """Kill the training processes."""
        self.group.close()

    def _check_restored(self) -> None:
        """Raise CheckpointUnreadable if the ranks disagree or have not loaded the optimizer's state."""
        state = self.group.states[0]
        self._parallel, self._scheduled = state.parallel, state.scheduled
        steps = {rank.optimizer_steps for rank in self.group.states}
        if steps != {self.progress.version.step}:
            raise CheckpointUnreadable(
                f"slime loaded an optimizer after {sorted(steps)} updates, the checkpoint has "
                f"{self.progress.version.step}: its moments are missing; resume from another checkpoint"
            )

    def _check_visible(self, folder: Path) -> None:
        token = secrets.token_hex(8)
        names = [f"rank-{state.rank}" for state in self.group.states]
        self.group.call("leave_token", str(folder), token)
        try:
            found: list[Sequence[str]] = [visibility.unseen(folder, names, token)]
            found += self.group.call("unseen", str(folder), token)
        finally:
            visibility.remove_tokens(folder, names)
        visibility.refuse_unseen(folder, dict(zip(("the learner's node", *names), found, strict=True)))


def _withdraw(folder: Path) -> None:
    """Remove a folder, if it exists, in such a way that it never looks complete with a part of its files. (Without its
    index, slime's SGLang takes a delta for a whole model.)"""
    if folder.exists():
        shutil.rmtree(folder.rename(folder.with_name(f"{_STAGED}removed-{folder.name}")))


def keep_newest_snapshots(root: Path, count: int) -> None:
    """Remove all but the `count` newest snapshot directories, by version."""
    complete = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(_STAGED)]
    for path in sorted(complete, key=lambda path: PolicyVersion.parse(path.name))[:-count]:
        _withdraw(path)


def _slime_metrics(results: Sequence[SlimeRankStep]) -> dict[str, float]:
    """Return the numbers of the rank that logs training, without slime's own counters."""
    logged = [result for result in results if "train/loss" in result.metrics]
    if not logged:
        raise RankFailed("no rank reported a loss: slime did not train the batch")
    trained = {
        name.removeprefix("train/"): value
        for name, value in logged[0].metrics.items()
        if name.startswith("train/") and not name.startswith(_NOT_REPORTED)
    }
    return {_RENAMED.get(name, name): value for name, value in trained.items()} | {
        "learning_rate": logged[0].learning_rate
    }
