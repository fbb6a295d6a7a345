"""Bodies of the template routes, and the names, files and steps in them.

Unknown fields are ignored; known ones that this server does not support are refused by name.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from headrace.sandboxes.images.build_steps import MAX_STEPS, StepKind
from headrace.serve.sandbox_servers.e2b_state.errors import ApiError

DEFAULT_TAG: Final = "default"
NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
TAG: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FILES_HASH: Final = re.compile(r"[0-9a-f]{64}")
MAX_TAGS: Final = 20
_MAX_COMMAND_CHARACTERS: Final = 64 << 10


def _no_null(value: Any) -> Any:
    return [] if value is None else value


Names = Annotated[list[str], BeforeValidator(_no_null)]
Argument = Annotated[str, Field(max_length=_MAX_COMMAND_CHARACTERS)]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class NewTemplate(_Body):
    """Body of POST /v3/templates."""

    name: str = ""
    alias: str = ""
    tags: Names = Field(default_factory=list)
    cpu_count: Annotated[int, Field(alias="cpuCount", ge=0)] = 0
    memory_mb: Annotated[int, Field(alias="memoryMB", ge=0)] = 0


class TemplateStep(_Body):
    """A step of a build."""

    kind: Annotated[StepKind, Field(alias="type")]
    args: Annotated[list[Argument], BeforeValidator(_no_null), Field(max_length=1000)] = Field(default_factory=list)
    files_hash: Annotated[str | None, Field(alias="filesHash")] = None
    force: bool = False


class StartBuild(_Body):
    """Body of POST /v2/templates/{id}/builds/{build}."""

    from_image: Annotated[str | None, Field(alias="fromImage", max_length=512)] = None
    from_template: Annotated[str | None, Field(alias="fromTemplate", max_length=512)] = None
    from_image_registry: Annotated[Any, Field(alias="fromImageRegistry")] = None
    force: bool = False
    steps: Annotated[list[TemplateStep], BeforeValidator(_no_null), Field(max_length=MAX_STEPS)] = Field(
        default_factory=list
    )
    start_cmd: Annotated[str | None, Field(alias="startCmd", max_length=_MAX_COMMAND_CHARACTERS)] = None
    ready_cmd: Annotated[str | None, Field(alias="readyCmd", max_length=_MAX_COMMAND_CHARACTERS)] = None


class AssignTags(_Body):
    """Body of POST /templates/tags."""

    target: str
    tags: Names


class RemoveTags(_Body):
    """Body of DELETE /templates/tags."""

    name: str
    tags: Names


def split_name(text: str) -> tuple[str, str]:
    """Return the name and the tag ("" without one) of `name[:tag]`. Raises ApiError 400."""
    name, _, tag = text.partition(":")
    if not NAME.fullmatch(name) or (tag and not TAG.fullmatch(tag)):
        rule = "letters, digits and ._/- (at most 128), and a tag of at most 64 after a colon"
        raise ApiError(400, f"template name {text[:200]!r}: must have {rule}")
    return name, tag


def check_tags(tags: list[str]) -> list[str]:
    """Return tags without repetitions. Raises ApiError 400."""
    if len(tags) > MAX_TAGS or not all(TAG.fullmatch(tag) for tag in tags):
        raise ApiError(400, f"tags: at most {MAX_TAGS}, of letters, digits and ._- (at most 64 each)")
    return list(dict.fromkeys(tags))
