"""Directories that engines read snapshots from: hard links to the learner's files, kept as long as they are needed.

Invariants:
- A directory is complete when it appears under its version's name, and its files are never written again.
- A learner may remove its own files at any time: the links stay. Kept are the directories of the two newest versions
  and every directory that an engine may still be reading.
- An engine may still be reading until it has answered, or has left. An engine that was told to read and did not answer
  holds its directory even if it is out of routing.
- Where files cannot be linked (another file system), shards are copied, and a directory is read where the learner wrote
  it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.buffer.primitives.durable_files import link_or_copy
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.policies.errors import EngineDown, EngineRefused, PushError
from headrace.policies.learner import WeightsDirectory, WeightsShard, WeightsSnapshot
from headrace.policies.models.model_files import INDEX, WEIGHTS
from headrace.policies.tensors import read_specs

logger = logging.getLogger(__name__)

KEPT_DIRECTORIES = 2
"""Number of newest directories to keep: the one being pushed and the one before it."""
DESCRIPTION_SUFFIXES = (".json", ".jinja", ".txt", ".model")
"""Suffixes of the files that describe a model: config, tokenizer and chat template."""
STAGED_SUFFIX = ".staged"


def description_files(model_dir: Path) -> list[Path]:
    """Return the files of a model directory that describe the model, not where its weights are."""
    return [file for file in model_dir.iterdir() if file.suffix in DESCRIPTION_SUFFIXES and file.name != INDEX]


class DirectoryReaders:
    """Engines that may be reading a directory. `is_member` tells whether an engine still exists."""

    def __init__(self, is_member: Callable[[EngineId], bool] = lambda _: True) -> None:
        self._is_member = is_member
        self._reading: dict[EngineId, Path] = {}

    @asynccontextmanager
    async def reading(self, engine_id: EngineId, path: Path) -> AsyncIterator[None]:
        """Mark the engine as reading `path` during the call inside the context. The mark stays if the call ends without
        an answer."""
        self.mark(engine_id, path)
        try:
            yield
        except (EngineRefused, EngineDown):
            self._reading.pop(engine_id, None)
            raise
        self._reading.pop(engine_id, None)

    def mark(self, engine_id: EngineId, path: Path) -> None:
        """Mark an engine that may be reading `path` since before this object existed."""
        self._reading[engine_id] = path

    def held(self) -> frozenset[Path]:
        """Return the directories that may be being read."""
        self._reading = {engine_id: path for engine_id, path in self._reading.items() if self._is_member(engine_id)}
        return frozenset(self._reading.values())


class SnapshotDirectories:
    """Directories of the snapshots of one run, in the folder `root`, which is created when it is needed. `model_dir`
    is the served model's directory, whose config and tokenizer complete shards to a directory."""

    def __init__(self, root: Path, model_dir: Path, readers: DirectoryReaders) -> None:
        self._root = root
        self.model_dir = model_dir
        self._newest: tuple[WeightsSnapshot, WeightsDirectory] | None = None
        self.readers = readers

    def path_of(self, version: PolicyVersion) -> Path:
        return self._root / str(version)

    async def of(self, snapshot: WeightsSnapshot) -> WeightsDirectory:
        """Return a complete directory of the snapshot, and remove the directories that are no longer needed. Raises
        PushError when it cannot be written, ModelInvalid for an unreadable shard."""
        try:
            return await asyncio.to_thread(self._make, snapshot)
        except OSError as error:
            raise PushError(f"no directory of snapshot {snapshot.version} in {self._root}: {error}") from error

    def _make(self, snapshot: WeightsSnapshot) -> WeightsDirectory:
        if self._newest is not None and self._newest[0] == snapshot and self._newest[1].path.is_dir():
            return self._newest[1]
        final = self.path_of(snapshot.version)
        staged = final.with_name(final.name + STAGED_SUFFIX)
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
        if snapshot.directory is None:
            digests = self._fill_from_shards(staged, snapshot.shards)
        else:
            digests = dict(snapshot.directory.digests)
            try:
                for name in digests:
                    os.link(snapshot.directory.path / name, staged / name)
            except OSError as error:
                logger.warning("engines read %s itself, since it cannot be linked: %s", snapshot.directory.path, error)
                shutil.rmtree(staged)
                return snapshot.directory
        if final.exists() and not _same_files(staged, final):
            # A version is written once, except by an evaluation of other weights under the same name.
            shutil.rmtree(final)
        if final.exists():
            shutil.rmtree(staged)
        else:
            staged.rename(final)
        prune(self._root, self.readers.held() | {final})
        made = WeightsDirectory(path=final, digests=dict(sorted(digests.items())))
        self._newest = snapshot, made
        return made

    def _fill_from_shards(self, staged: Path, shards: tuple[WeightsShard, ...]) -> dict[str, str]:
        """Complete the learner's shards to a Hugging Face directory, and return the digests of its files."""
        count = len(shards)
        names = [f"model-{number + 1:05}-of-{count:05}.safetensors" for number in range(count)]
        if count == 1:
            names = [WEIGHTS]
        for shard, name in zip(shards, names, strict=True):
            link_or_copy(shard.path, staged / name)
        described = description_files(self.model_dir)
        for file in described:
            link_or_copy(file, staged / file.name)
        texts = [staged / file.name for file in described]
        if count > 1:
            weight_map = {name: file for file in names for name in read_specs(staged / file)}
            (staged / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
            texts.append(staged / INDEX)
        digests = {name: shard.sha256 for shard, name in zip(shards, names, strict=True)}
        return digests | {text.name: WeightsShard.of(text).sha256 for text in texts}


def prune(root: Path, held: Iterable[Path]) -> None:
    """Remove the directories in `root` that are neither among the two newest versions nor held."""
    made = {version: path for path in root.iterdir() if (version := _version_of(path.name)) is not None}
    kept = {made[version] for version in sorted(made)[-KEPT_DIRECTORIES:]} | set(held)
    for path in made.values():
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _version_of(name: str) -> PolicyVersion | None:
    try:
        return PolicyVersion.parse(name)
    except ValueError:
        return None


def _same_files(first: Path, second: Path) -> bool:
    """Return True if both directories hold the same weights and the same names."""
    ours, theirs = _inodes(first), _inodes(second)
    weights = [name for name in ours if name.endswith(".safetensors")]
    return ours.keys() == theirs.keys() and all(ours[name] == theirs[name] for name in weights)


def _inodes(directory: Path) -> Mapping[str, int]:
    return {file.name: file.stat().st_ino for file in directory.iterdir()}
