"""The agent opencode, over Chat Completions. It makes an extra call beside the first turn to name its conversation."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from headrace.actors.agents.cli_agent import CliAgent, Ending, Launch

if TYPE_CHECKING:
    from headrace.actors.agents.cli_agent import Place, Printed

_PROVIDER: Final = "gateway"


class Opencode(CliAgent):
    name = "opencode"

    def launch(self, place: Place) -> Launch:
        program = self.program(place, "opencode")
        model: dict[str, Any] = {"name": self._config.model}
        if place.context_tokens is not None:
            model["limit"] = {"context": place.context_tokens, "output": max(1, place.context_tokens // 4)}
        name = f"{_PROVIDER}/{self._config.model}"
        settings = {
            "provider": {
                _PROVIDER: {
                    "npm": "@ai-sdk/openai-compatible",
                    "options": {"baseURL": f"{place.url}/v1", "apiKey": place.token},
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
                f"{place.home}/.config/opencode/opencode.json": json.dumps(settings).encode(),
                place.prompt_file: place.prompt.encode(),
            },
            stdin=place.prompt_file,
        )

    def ending(self, printed: Printed) -> Ending:
        result, turns, failure = "", 0, ""
        for event in printed.events():
            match event:
                case {"type": "text", "part": {"text": str() as text}}:
                    result = result or text
                case {"type": "step_finish"}:
                    turns += 1
                case {"type": "error", "error": error}:
                    failure = failure or json.dumps(error)
        return Ending(result=failure or result, turns=turns, error=bool(failure) or not turns)
