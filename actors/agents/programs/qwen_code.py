"""The agent qwen-code, which uses Chat Completions. It needs Node 20, which is installed with it."""

from __future__ import annotations

from headrace.actors.agents.programs.cli_agent import (
    CliAgent,
    Launch,
    LaunchContext,
    OutputTail,
    ProgramEnd,
    result_event,
)


class QwenCode(CliAgent):
    name = "qwen-code"

    def launch(self, context: LaunchContext) -> Launch:
        flags = ("--yolo", "--auth-type", "openai", "--output-format", "stream-json")
        installed = (f"{context.folder}/node", f"{context.folder}/qwen-code/cli.js")
        program = (self._config.in_image,) if self._config.in_image else installed
        return Launch(
            command=(*program, *flags, *self._config.arguments),
            environment={
                "OPENAI_API_KEY": context.token,
                "OPENAI_BASE_URL": f"{context.url}/v1",
                "OPENAI_MODEL": self._config.model,
                "QWEN_TELEMETRY_ENABLED": "false",
            },
            files={context.prompt_file: context.prompt.encode()},
            stdin=context.prompt_file,
        )

    def ending(self, output: OutputTail) -> ProgramEnd:
        return result_event(output, failure="error")
