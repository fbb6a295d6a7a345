"""Folders in which a trainer of the user writes weights and states.

Invariants:
- Weights and a state of one version have two folders: the state is written while engines may be reading the weights.
- What a trainer wrote fits the model of the run and has no links.
- A checkpoint has all files that the trainer saved, so that its own state (such as that of the optimizer) belongs to
  exactly these weights, and what describes the model (config, tokenizer) if it is missing there.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Final

from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.errors import ModelInvalid
from headrace.policies.learners.checkpoint_retention import remove_old
from headrace.policies.learners.checkpoints import Manifest, publish, stage, write_manifest
from headrace.policies.learners.config import LearnerConfig
from headrace.policies.push.compatibility import check_fits, read_model_specs
from headrace.policies.push.directories import description_files

STATE_SUFFIX: Final = "-state"
_FOLDER: Final = re.compile(rf"\d+\.\d+({STATE_SUFFIX})?")


class TrainerFolders:
    """Folders of one run's trainer, below `root`, and the checkpoints that are made of them. All calls block."""

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
        check_fits(read_model_specs(directory), self._config.model_dir)

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
