"""Settings of the loop agent."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from headrace.actors.agents.loop.action_parsers import PARSERS, ParserKind
from headrace.actors.agents.loop.contexts import FULL, head_share
from headrace.actors.agents.loop.judge import JudgeConfig
from headrace.actors.errors import ConfigError
from headrace.actors.services.templates import check_names, filled
from headrace.buffer.primitives.sections import Section
from headrace.buffer.tasks.task import Task

_OPENING: Final = ("instruction", "given")
_NAMES: Final = {"system": _OPENING, "first": _OPENING, "observation": ("observation", "turns_left")}
"""Names that each template can use."""


class LoopConfig(Section):
    """Settings of the loop agent. `system`, `first` and `observation` are Jinja templates."""

    parser: ParserKind = ParserKind.LINE
    """Form of the policy's actions: `line`, `fence`, `tags`, `calls` or `search`."""
    max_turns: int = Field(default=16, ge=1)
    """Maximum number of policy answers, including malformed ones."""
    system: str = ""
    """Template of the system message, with `instruction` and the task's `given`; empty for none. A task's own messages
    and those of the environment follow it."""
    first: str = "{{ instruction }}"
    """Template of the user's first message, for tasks and environments without messages of their own."""
    observation: str = "{{ observation }}"
    """Template of the message after an action, with `observation` and `turns_left`."""
    malformed: str = ""
    """Text that the policy reads after an answer without an action, which costs a turn. If it is empty, such an answer
    ends the rollout with the outcome `invalid`."""
    truncated: Literal["end", "parse"] = "end"
    """Treatment of an answer that was cut off at its token limit: `end` ends the rollout; `parse` reads it like every
    other answer."""
    stop: tuple[str, ...] = ()
    """Further strings at which an answer ends; the string is part of the answer. The parser `search` stops at its
    closing tags anyway."""
    inline: bool = False
    """Continue the policy's own message after an observation, which is inserted into it (Search-R1), instead of sending
    it in a message of its own."""
    context: str = FULL
    """Context policy: `full`, or `head_tail(0.3)`, which omits turns in the middle of a conversation that would not
    leave room for an answer."""
    judge: JudgeConfig = JudgeConfig()
    """Judge of steps, whose scores are added to the reward."""

    @field_validator("system", "first", "observation")
    @classmethod
    def _is_template(cls, value: str, info: ValidationInfo) -> str:
        check_names(value, _NAMES[info.field_name or ""])
        return value

    @field_validator("context")
    @classmethod
    def _is_context(cls, value: str) -> str:
        head_share(value)
        return value

    @model_validator(mode="after")
    def _fits(self) -> Self:
        filled(self.observation, observation="", turns_left=0)
        if self.inline and PARSERS[self.parser].uses_calls:
            raise ValueError("inline turns have no tool calls; choose another parser than calls")
        if self.inline and self.context != FULL:
            raise ValueError("inline turns are one message, of which no turn can be omitted; set context to full")
        return self

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """All strings at which an answer ends."""
        return (*PARSERS[self.parser].stop, *self.stop)


def refuse_unfilled_templates(config: LoopConfig, task: Task) -> None:
    """Raise ConfigError if the task's `given` does not fill the templates of the first messages."""
    given = task.environment.given if task.environment else {}
    for name in ("system", "first"):
        try:
            filled(getattr(config, name), instruction=task.instruction, given=given)
        except ValueError as error:
            raise ConfigError(
                f"task {task.id}: agent.loop.{name}: {error}; correct the template, or the task's environment.given"
            ) from error
