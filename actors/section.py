"""Base of the sections of a run's configuration."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of the sections of a run's configuration: frozen, unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
