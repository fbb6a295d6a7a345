"""mini-swe-agent, by its Python API: a driver of ours runs it inside the sandbox, with packages that were installed for
the Python of the task's image (3.10 and later).

Its commands find neither those packages nor the session's address in their environment: the driver gets both in a file.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

from headrace.actors.agents.cli_agent import CliAgent, Ending, Launch
from headrace.actors.in_sandbox import source

if TYPE_CHECKING:
    from headrace.actors.agents.cli_agent import Place, Printed, ProgramConfig


class MiniMode(StrEnum):
    """How the policy gives its commands."""

    TOOL = "tool"
    """As calls of one tool, `bash`."""
    TEXT = "text"
    """As one block of code in its text."""


class MiniSweAgentConfig(BaseModel):
    """Settings of mini-swe-agent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: MiniMode = MiniMode.TOOL
    """`tool` or `text`."""
    python: str = "python3"
    """The image's Python that runs the installed packages; its version must be one they were installed for. With
    `in_image`, which is then a Python that has minisweagent and litellm itself, it means nothing."""
    command_timeout_s: int = Field(default=60, ge=1)
    """Deadline of one command of the policy."""


class MiniSweAgent(CliAgent):
    name = "mini-swe-agent"

    def __init__(self, program: ProgramConfig, settings: MiniSweAgentConfig) -> None:
        super().__init__(program)
        self._settings = settings

    def launch(self, place: Place) -> Launch:
        config, folder = self._config, f"{place.home}/.mini-swe-agent"
        driver, settings = f"{folder}/driver.py", f"{folder}/settings.json"
        python = (config.in_image,) if config.in_image else (self._settings.python, "-I", "-S")
        told = {
            "packages": "" if config.in_image else place.folder,
            "mode": self._settings.mode.value,
            "task": place.prompt,
            "model": f"openai/{config.model}",
            "url": f"{place.url}/v1",
            "key": place.token,
            "working_directory": place.working_directory,
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
            files={driver: source("mini_driver").encode(), settings: json.dumps(told).encode()},
        )

    def ending(self, printed: Printed) -> Ending:
        for event in printed.events():
            match event:
                case {"type": "result", "status": str() as status, "result": str() as result, "turns": int() as turns}:
                    return Ending(result=result or status, turns=turns, error=status != "Submitted")
        return Ending(error=True)
