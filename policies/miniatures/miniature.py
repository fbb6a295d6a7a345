"""The interface of miniatures: small models, tasks and data of a published system, generated from a seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.policies.miniatures.demonstrations import Demonstrator
from headrace.policies.miniatures.fitting import FitConfig
from headrace.policies.models.tiny import CHAT_TEMPLATE

if TYPE_CHECKING:
    from headrace.policies.tokens.tokenizer import ChatTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Miniature:
    """A miniature. `pieces` are the tokens of its vocabulary beside the bytes; `write_data` writes its tasks
    (train.jsonl, heldout.jsonl) and further data into a folder, from a seed."""

    pieces: tuple[str, ...]
    demonstrator: Callable[[ChatTokenizer, int, FitConfig], Demonstrator]
    write_data: Callable[[Path, int], None]
    chat_template: str = CHAT_TEMPLATE
    fit: FitConfig = field(default_factory=FitConfig)
