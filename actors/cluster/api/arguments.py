"""Arguments of the control API."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class ControlArguments(BaseModel):
    """Arguments of the application, `args` in the file for `serve deploy`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key_file: Path
    """File with lines `SHA256 ROLE OWNER`, on every node that may have a replica."""
    replicas: Annotated[int, Field(ge=1)] = 2
    cpus: Annotated[float, Field(ge=0)] = 0.1
    """CPUs that each replica reserves."""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """Labels of the nodes that may have a replica, e.g. headrace/role; by default all nodes."""
