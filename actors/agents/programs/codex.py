"""The agent Codex, which uses OpenAI's binary and the Responses API, the only API that it supports."""

from __future__ import annotations

import json
from typing import Final

from pydantic import Field

from headrace.actors.agents.programs.cli_agent import (
    CliAgent,
    Launch,
    LaunchContext,
    OutputTail,
    ProgramConfig,
    ProgramEnd,
)
from headrace.buffer.primitives.sections import Section

_KEY: Final = "GATEWAY_KEY"
_PROVIDER: Final = "gateway"


class CodexConfig(Section):
    """Settings of Codex."""

    compact_at: float = Field(default=0.8, gt=0, le=1)
    """Share of the session's context after which Codex summarizes its history."""


class Codex(CliAgent):
    name = "codex"

    def __init__(self, program: ProgramConfig, settings: CodexConfig) -> None:
        super().__init__(program)
        self._compact_at = settings.compact_at

    def launch(self, context: LaunchContext) -> Launch:
        flags = ("--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
        program = self.program(context, "bin/codex")
        home = f"{context.home}/.codex"
        settings = [f"model = {_quoted(self._config.model)}", f"model_provider = {_quoted(_PROVIDER)}"]
        if context.context_tokens is not None:
            settings += [
                f"model_context_window = {context.context_tokens}",
                f"model_auto_compact_token_limit = {int(context.context_tokens * self._compact_at)}",
            ]
        settings += [
            f"[model_providers.{_PROVIDER}]",
            f"name = {_quoted(_PROVIDER)}",
            f"base_url = {_quoted(context.url + '/v1')}",
            f"env_key = {_quoted(_KEY)}",
            'wire_api = "responses"',
            "[analytics]",
            "enabled = false",
        ]
        config = "".join(f"{line}\n" for line in settings).encode()
        return Launch(
            command=(program, "exec", *flags, *self._config.arguments, "-"),
            environment={"CODEX_HOME": home, _KEY: context.token},
            files={f"{home}/config.toml": config, context.prompt_file: context.prompt.encode()},
            stdin=context.prompt_file,
        )

    def ending(self, output: OutputTail) -> ProgramEnd:
        result, turns, failure = "", 0, ""
        for event in output.events():
            match event:
                case {"type": "turn.failed", "error": {"message": str() as message}}:
                    failure = failure or message
                case {"type": "error", "message": str() as message}:
                    failure = failure or message
                case {"type": "turn.completed"}:
                    turns += 1
                case {"type": "item.completed", "item": {"type": "agent_message", "text": str() as text}}:
                    result = result or text
        # The log also has errors that a retry fixed, before the turn that was completed.
        failed = not turns
        return ProgramEnd(result=failure if failed else result, error=failed)


def _quoted(text: str) -> str:
    """Quote a TOML basic string. JSON strings are valid TOML strings except for DEL."""
    return json.dumps(text).replace("\x7f", "\\u007f")
