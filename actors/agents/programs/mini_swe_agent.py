"""The agent mini-swe-agent, whose Python API a driver calls in the sandbox.

The packages must have been installed for the Python version of the task image (3.10 or later). The policy's commands
see neither the packages nor the URL of the session in their environment, since the driver gets both in a file.
"""

from __future__ import annotations

import json
from enum import StrEnum

from pydantic import Field

from headrace.actors.agents.programs.cli_agent import (
    CliAgent,
    Launch,
    LaunchContext,
    OutputTail,
    ProgramConfig,
    ProgramEnd,
)
from headrace.actors.evaluation.in_sandbox import source
from headrace.buffer.primitives.sections import Section


class MiniMode(StrEnum):
    """Format in which the policy writes its commands."""

    TOOL = "tool"
    """Calls of one tool, `bash`."""
    TEXT = "text"
    """One code block in the text."""


class MiniSweAgentConfig(Section):
    """Settings of mini-swe-agent."""

    mode: MiniMode = MiniMode.TOOL
    """`tool` or `text`."""
    python: str = "python3"
    """Python interpreter in the image that runs the installed packages; they must have been installed for its version.
    Ignored with `in_image`, which must then be a Python interpreter with minisweagent and litellm installed."""
    command_timeout_s: int = Field(default=60, ge=1)
    """Deadline for one of the policy's commands."""


class MiniSweAgent(CliAgent):
    name = "mini-swe-agent"

    def __init__(self, program: ProgramConfig, settings: MiniSweAgentConfig) -> None:
        super().__init__(program)
        self._settings = settings

    def launch(self, context: LaunchContext) -> Launch:
        config, folder = self._config, f"{context.home}/.mini-swe-agent"
        driver, settings = f"{folder}/driver.py", f"{folder}/settings.json"
        python = (config.in_image,) if config.in_image else (self._settings.python, "-I", "-S")
        driver_settings = {
            "packages": "" if config.in_image else context.folder,
            "mode": self._settings.mode.value,
            "task": context.prompt,
            "model": f"openai/{config.model}",
            "url": f"{context.url}/v1",
            "key": context.token,
            "working_directory": context.working_directory,
            "command_timeout_s": self._settings.command_timeout_s,
        }
        return Launch(
            command=(*python, driver, *config.arguments, settings),
            environment={
                "MSWEA_GLOBAL_CONFIG_DIR": folder,
                "MSWEA_SILENT_STARTUP": "1",
                "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "4",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
            files={driver: source("mini_driver").encode(), settings: json.dumps(driver_settings).encode()},
        )

    def ending(self, output: OutputTail) -> ProgramEnd:
        for event in output.events():
            match event:
                case {"type": "result", "status": str() as status, "result": str() as result, "turns": int() as turns}:
                    return ProgramEnd(result=result or status, turns=turns, error=status != "Submitted")
        return ProgramEnd(error=True)
