"""Claude Code, by Anthropic's own binary and wire.

It names its models itself now and then (a subagent asks for a small one): the session's policy of model names decides
what those get. Left alone it would compact at a window of its own: it is told the session's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict

from headrace.actors.agents.cli_agent import CliAgent, Ending, Launch, result_event

if TYPE_CHECKING:
    from headrace.actors.agents.cli_agent import Place, Printed, ProgramConfig

# Root may skip permissions only where it is told that this is a sandbox.
_ROOT_MAY: Final = '[ "$(id -u)" != 0 ] || export IS_SANDBOX=1'


class ClaudeCodeConfig(BaseModel):
    """Settings of Claude Code."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bare: bool = False
    """Start it with `--bare`: three tools and a prompt of a thousand tokens instead of twenty-four and twenty
    thousand."""


class ClaudeCode(CliAgent):
    name = "claude-code"

    def __init__(self, program: ProgramConfig, settings: ClaudeCodeConfig) -> None:
        super().__init__(program)
        self._settings = settings

    def launch(self, place: Place) -> Launch:
        flags = ("--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions")
        bare = ("--bare",) if self._settings.bare else ()
        environment = {
            "ANTHROPIC_BASE_URL": place.url,
            "ANTHROPIC_AUTH_TOKEN": place.token,
            "ANTHROPIC_MODEL": self._config.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
        }
        if place.context_tokens is not None:
            environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(place.context_tokens)
        program = self.program(place, "claude")
        return Launch(
            command=(program, "-p", *flags, *bare, *self._config.arguments),
            environment=environment,
            files={place.prompt_file: place.prompt.encode()},
            setup=_ROOT_MAY,
            stdin=place.prompt_file,
        )

    def ending(self, printed: Printed) -> Ending:
        return result_event(printed, failure="errors")
