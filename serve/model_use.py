"""What becomes of a model name that an agent asks for."""

from __future__ import annotations

from enum import StrEnum


class ModelUse(StrEnum):
    """What becomes of turns under a model name."""

    TRAIN = "train"
    """Sampled from the policy and trained."""
    SERVE = "serve"
    """Sampled from the policy, masked as `side`."""
    REFUSE = "refuse"
    """Refused with 400."""
