"""Where checks run: device, sizes, and the folder of their models and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self, cast

from benches.learner.sizes import SIZES

Device = Literal["cpu", "cuda"]

BIG: Final = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
}
"""Sizes of Qwen3-0.6B, with 596 million parameters."""
SMALL: Final = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Device and folder of a suite. `small` takes the sizes of a test of the suite itself, which prove no figure."""

    device: Device
    small: bool
    folder: Path

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """Return the place that `words()` describes."""
        device, size, folder = words
        return cls(device=cast(Device, device), small=size == "small", folder=Path(folder))

    def words(self) -> tuple[str, str, str]:
        """Return the place as words of a command line."""
        return self.device, "small" if self.small else "big", str(self.folder)

    @property
    def backend(self) -> str:
        """Backend of process groups on the device."""
        return "nccl" if self.device == "cuda" else "gloo"

    @property
    def without_nccl(self) -> str:
        """What a sender on this device leaves out."""
        return "" if self.device == "cuda" else "NCCL: it needs a CUDA device, so the sender used gloo"

    @property
    def patience(self) -> int:
        """Factor of all time limits. A small suite tests only itself, on a machine that others may use."""
        return 15 if self.small else 1

    @property
    def compared_lengths(self) -> tuple[int, ...]:
        """Tokens of the rows of a batch in the checks that compare learners."""
        return (90, 70, 50, 30) if self.small else (900, 850, 700, 640, 420, 400, 310, 120)

    @property
    def row_lengths(self) -> tuple[int, int]:
        """Tokens of the two long rows."""
        return (64, 128) if self.small else (8192, 32_768)

    def model(self, *, big: bool = False) -> tuple[Path, int]:
        """Return a random model directory, written by the first check that needs it, and the size of its vocabulary."""
        sizes = SMALL if self.small else BIG if big else SIZES
        path = self.folder / f"model-{sizes['hidden_size']}"
        if not (path / "complete").exists():
            from benches.learner.figures import write_model  # imports torch

            write_model(path, sizes)
            (path / "complete").touch()
        return path, sizes["vocab_size"]
