"""The agent qwen-code, over Chat Completions. It needs Node 20, which is installed with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.actors.agents.cli_agent import CliAgent, Ending, Launch, result_event

if TYPE_CHECKING:
    from headrace.actors.agents.cli_agent import Place, Printed


class QwenCode(CliAgent):
    name = "qwen-code"

    def launch(self, place: Place) -> Launch:
        flags = ("--yolo", "--auth-type", "openai", "--output-format", "stream-json")
        installed = (f"{place.folder}/node", f"{place.folder}/qwen-code/cli.js")
        program = (self._config.in_image,) if self._config.in_image else installed
        return Launch(
            command=(*program, *flags, *self._config.arguments),
            environment={
                "OPENAI_API_KEY": place.token,
                "OPENAI_BASE_URL": f"{place.url}/v1",
                "OPENAI_MODEL": self._config.model,
                "QWEN_TELEMETRY_ENABLED": "false",
            },
            files={place.prompt_file: place.prompt.encode()},
            stdin=place.prompt_file,
        )

    def ending(self, printed: Printed) -> Ending:
        return result_event(printed, failure="error")
