"""The agent Claude Code, which uses Anthropic's binary and the Messages API.

Claude Code sometimes chooses models itself (a subagent uses a small one); the session's model name policy decides which
model answers. It would otherwise compact the conversation at its own default window, so it is given the session's
context limit.
"""

from __future__ import annotations

from typing import Final

from headrace.actors.agents.programs.cli_agent import (
    CliAgent,
    Launch,
    LaunchContext,
    OutputTail,
    ProgramConfig,
    ProgramEnd,
    result_event,
)
from headrace.buffer.primitives.sections import Section

_OF_TRACES: Final = {
    "CLAUDE_CODE_ENABLE_TELEMETRY": "1",
    "CLAUDE_CODE_ENHANCED_TELEMETRY_BETA": "1",
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_LOGS_EXPORTER": "none",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json",
}
# As root, Claude Code skips permissions only if it knows that this is a sandbox.
_ROOT_MAY: Final = '[ "$(id -u)" != 0 ] || export IS_SANDBOX=1'


class ClaudeCodeConfig(Section):
    """Settings of Claude Code."""

    bare: bool = False
    """Whether to start Claude Code with `--bare`, which gives 3 tools and a prompt of 1,000 tokens instead of 24 tools
    and 20,000 tokens."""
    traces: bool = False
    """Whether Claude Code records spans of its own (requests, tools, hooks), which become part of the rollout's trace.
    The commands that it runs then have a TRACEPARENT in their environment."""


class ClaudeCode(CliAgent):
    name = "claude-code"

    def __init__(self, program: ProgramConfig, settings: ClaudeCodeConfig) -> None:
        super().__init__(program)
        self._settings = settings

    def launch(self, context: LaunchContext) -> Launch:
        flags = ("--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions")
        bare = ("--bare",) if self._settings.bare else ()
        environment = {
            "ANTHROPIC_BASE_URL": context.url,
            "ANTHROPIC_AUTH_TOKEN": context.token,
            "ANTHROPIC_MODEL": self._config.model,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_ERROR_REPORTING": "1",
        }
        if self._settings.traces:
            environment |= {**_OF_TRACES, "OTEL_EXPORTER_OTLP_ENDPOINT": context.url}
        if context.context_tokens is not None:
            environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(context.context_tokens)
        program = self.program(context, "claude")
        return Launch(
            command=(program, "-p", *flags, *bare, *self._config.arguments),
            environment=environment,
            files={context.prompt_file: context.prompt.encode()},
            setup=_ROOT_MAY,
            stdin=context.prompt_file,
        )

    def ending(self, output: OutputTail) -> ProgramEnd:
        return result_event(output, failure="errors")
