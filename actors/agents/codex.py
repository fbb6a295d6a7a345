"""Codex, by OpenAI's own binary and the Responses wire (it knows no other)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from pydantic import BaseModel, ConfigDict, Field

from headrace.actors.agents.cli_agent import CliAgent, Ending, Launch

if TYPE_CHECKING:
    from headrace.actors.agents.cli_agent import Place, Printed, ProgramConfig

_KEY: Final = "GATEWAY_KEY"
_PROVIDER: Final = "gateway"


class CodexConfig(BaseModel):
    """Settings of Codex."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    compact_at: float = Field(default=0.8, gt=0, le=1)
    """It has its history summarised when so much of the session's context is used."""


class Codex(CliAgent):
    name = "codex"

    def __init__(self, program: ProgramConfig, settings: CodexConfig) -> None:
        super().__init__(program)
        self._compact_at = settings.compact_at

    def launch(self, place: Place) -> Launch:
        flags = ("--json", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
        program = self.program(place, "bin/codex")
        home = f"{place.home}/.codex"
        return Launch(
            command=(program, "exec", *flags, *self._config.arguments, "-"),
            environment={"CODEX_HOME": home, _KEY: place.token},
            files={f"{home}/config.toml": self._settings(place).encode(), place.prompt_file: place.prompt.encode()},
            stdin=place.prompt_file,
        )

    def _settings(self, place: Place) -> str:
        lines = [f"model = {_quoted(self._config.model)}", f"model_provider = {_quoted(_PROVIDER)}"]
        if place.context_tokens is not None:
            lines += [
                f"model_context_window = {place.context_tokens}",
                f"model_auto_compact_token_limit = {int(place.context_tokens * self._compact_at)}",
            ]
        lines += [
            f"[model_providers.{_PROVIDER}]",
            f"name = {_quoted(_PROVIDER)}",
            f"base_url = {_quoted(place.url + '/v1')}",
            f"env_key = {_quoted(_KEY)}",
            'wire_api = "responses"',
            "[analytics]",
            "enabled = false",
        ]
        return "\n".join(lines) + "\n"

    def ending(self, printed: Printed) -> Ending:
        result, turns, failure = "", 0, ""
        for event in printed.events():
            match event:
                case {"type": "turn.failed", "error": {"message": str() as message}}:
                    failure = failure or message
                case {"type": "error", "message": str() as message}:
                    failure = failure or message
                case {"type": "turn.completed"}:
                    turns += 1
                case {"type": "item.completed", "item": {"type": "agent_message", "text": str() as text}}:
                    result = result or text
        # An error that a retry mended is in the log too, before the turn that was completed.
        failed = not turns
        return Ending(result=failure if failed else result, error=failed)


def _quoted(text: str) -> str:
    """A basic string of TOML, of which JSON's are a part but for DEL."""
    return json.dumps(text).replace("\x7f", "\\u007f")
