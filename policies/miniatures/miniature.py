"""The interface of miniatures: small models, tasks and data of a published system, generated from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from headrace.policies.miniatures.demonstrations import Demonstrator
from headrace.policies.miniatures.fitting import FitConfig
from headrace.policies.models.tiny import CHAT_TEMPLATE

if TYPE_CHECKING:
    from headrace.policies.tokens.tokenizer import ChatTokenizer


class MakeDemonstrator(Protocol):
    """Factory of a miniature's demonstrator."""

    def __call__(self, tokenizer: ChatTokenizer, seed: int, fit: FitConfig) -> Demonstrator: ...


class WriteData(Protocol):
    """Writer of a miniature's tasks (train.jsonl, heldout.jsonl) and further data."""

    def __call__(self, folder: Path, seed: int) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Miniature:
    """A miniature. `pieces` are the tokens of its vocabulary beside the bytes."""

    pieces: tuple[str, ...]
    demonstrator: MakeDemonstrator
    write_data: WriteData
    chat_template: str = CHAT_TEMPLATE
    fit: FitConfig = field(default_factory=FitConfig)
