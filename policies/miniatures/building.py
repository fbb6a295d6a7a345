"""Builds miniatures into a cache folder, once for each version of their sources.

Invariant:
- A miniature's folder appears complete or not at all; several processes that need the same one build it once.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from headrace.buffer.primitives.durable_files import publish_folder
from headrace.buffer.primitives.file_lock import FileLock
from headrace.policies.miniatures.fitting import FitConfig, fit, save_weights
from headrace.policies.miniatures.names import PREFIX, resolved
from headrace.policies.miniatures.repairs import SWE
from headrace.policies.miniatures.retail import RETAIL
from headrace.policies.miniatures.search_facts import SEARCH
from headrace.policies.miniatures.terminal import ECHO, ENDLESS
from headrace.policies.models.qwen_config import QwenConfig
from headrace.policies.models.tiny import model_config, write_description
from headrace.policies.tokens.tokenizer import ChatTokenizer

MINIATURES: Final = {"endless": ENDLESS, "echo": ECHO, "search_r1": SEARCH, "swe_rl": SWE, "tau": RETAIL}
SEED: Final = 0


def build(name: str, started: Callable[[], None] = lambda: None) -> Path:
    """Return the folder of a miniature: model/, train.jsonl, heldout.jsonl and further data. Builds it first if it does
    not exist, which takes about a minute, and calls `started` then. Raises OSError, FitDiverged."""
    folder = resolved(f"{PREFIX}{name}")
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if folder.is_dir():
            return folder
        started()
        staged = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(staged, ignore_errors=True)
        try:
            write(name, staged)
            publish_folder(staged, folder)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
    return folder


def write(name: str, folder: Path, fit_config: FitConfig | None = None) -> None:
    """Write the files of a miniature into a folder that does not exist. `fit_config` replaces the miniature's own, for
    example to train its policy for fewer steps. Raises OSError, FitDiverged."""
    miniature, model_folder = MINIATURES[name], folder / "model"
    settings = fit_config or miniature.fit
    write_description(model_folder, miniature.pieces, miniature.chat_template)
    miniature.write_data(folder, SEED)
    model = QwenConfig.from_keys(model_config(miniature.pieces), source=str(model_folder))
    demonstrator = miniature.demonstrator(ChatTokenizer(model_folder), SEED, settings)
    save_weights(model_folder, model, fit(settings, model, demonstrator))
