"""What a trainer of the user asks for: the bodies of the routes `take`, `commit`, `release` and `weights`, which travel
to the learner's actor as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

Version = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}\.(0|[1-9][0-9]{0,8})$")]
Lease = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Text = Annotated[str, Field(max_length=4096)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Call(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Take(_Call):
    """Ask for the next order. `version` is that of the weights which the trainer holds; None if it holds no state."""

    version: Version | None = None
    timeout_s: Annotated[float, Field(ge=0, le=60)] = 20.0


class Commit(_Call):
    """A batch has been trained; `skipped` means that its weights did not change."""

    lease: Lease
    metrics: Annotated[dict[Annotated[str, Field(min_length=1, max_length=128)], Finite], Field(max_length=256)] = (
        Field(default_factory=dict)
    )
    skipped: bool = False


class Release(_Call):
    """Give a batch back untrained: without the `refused` rollouts (reason by id), as a failed try with a `reason`, or,
    with neither, to train it later."""

    lease: Lease
    reason: Text = ""
    refused: Annotated[dict[str, Text], Field(max_length=4096)] = Field(default_factory=dict)


class Weights(_Call):
    """Weights of a version: in a directory, or `pushed` to the engines by the trainer."""

    version: Version
    directory: Annotated[str, Field(min_length=1, max_length=4096, pattern=r"^/[^\x00]*$")] | None = None
    pushed: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.directory is None) is not self.pushed:
            raise ValueError("name a directory, or set pushed to true")
        return self

    @property
    def path(self) -> Path | None:
        return None if self.directory is None else Path(self.directory)


TrainerCall: TypeAlias = Take | Commit | Release | Weights
