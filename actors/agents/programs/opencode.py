"""The agent opencode, which uses Chat Completions. In addition to the first turn, it makes a call to generate a title
for its conversation."""

from __future__ import annotations

import json
from typing import Any, Final

from headrace.actors.agents.programs.cli_agent import CliAgent, Launch, LaunchContext, OutputTail, ProgramEnd

_PROVIDER: Final = "gateway"


class Opencode(CliAgent):
    name = "opencode"

    def launch(self, context: LaunchContext) -> Launch:
        program = self.program(context, "opencode")
        model: dict[str, Any] = {"name": self._config.model}
        if context.context_tokens is not None:
            model["limit"] = {"context": context.context_tokens, "output": max(1, context.context_tokens // 4)}
        name = f"{_PROVIDER}/{self._config.model}"
        settings = {
            "provider": {
                _PROVIDER: {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": f"{context.url}/v1", "apiKey": context.token},
                    "models": {self._config.model: model},
                }
            },
            "model": name,
            "small_model": name,
            "permission": {"edit": "allow", "bash": "allow"},
            "autoupdate": False,
        }
        switches = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
        return Launch(
            command=(program, "run", "--format", "json", *self._config.arguments),
            environment={f"OPENCODE_DISABLE_{switch}": "1" for switch in switches},
            files={
                f"{context.home}/.config/opencode/opencode.json": json.dumps(settings).encode(),
                context.prompt_file: context.prompt.encode(),
            },
            stdin=context.prompt_file,
        )

    def ending(self, output: OutputTail) -> ProgramEnd:
        result, turns, failure = "", 0, ""
        for event in output.events():
            match event:
                case {"type": "text", "part": {"text": str() as text}}:
                    result = result or text
                case {"type": "step_finish"}:
                    turns += 1
                case {"type": "error", "error": error}:
                    failure = failure or json.dumps(error)
        return ProgramEnd(result=failure or result, turns=turns, error=bool(failure) or not turns)
