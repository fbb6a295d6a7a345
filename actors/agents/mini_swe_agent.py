"""mini-swe-agent, by its Python API: a driver of ours runs it inside the sandbox, with packages that were installed for
the Python of the task's image (3.10 and later).

Its commands find neither those packages nor the session's address in their environment: the driver gets both in a file.
"""

from __future__ import annotations

import json
from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import Field

from headrace.actors.agents.cli_agent import CliAgent, CliAgentConfig, Ending, Launch
from headrace.actors.in_sandbox import source

if TYPE_CHECKING:
    from headrace.actors.agents.cli_agent import Place, Printed


class MiniMode(StrEnum):
    """How the policy gives its commands."""

    TOOL = "tool"
    """As calls of one tool, `bash`."""
    TEXT = "text"
    """As one block of code in its text."""


class MiniSweAgentConfig(CliAgentConfig):
    """Settings of mini-swe-agent. `program` is a Python of the image that has minisweagent and litellm itself."""

    mode: MiniMode = MiniMode.TOOL
    """`tool` or `text`."""
    python: str = "python3"
    """The image's Python that runs the installed packages; its version must be one they were installed for."""
    command_timeout_s: int = Field(default=60, ge=1)
    """Deadline of one command of the policy."""


class MiniSweAgent(CliAgent[MiniSweAgentConfig]):
    name = "mini-swe-agent"

    def launch(self, place: Place) -> Launch:
        config, folder = self._config, f"{place.home}/.mini-swe-agent"
        driver, settings = f"{folder}/driver.py", f"{folder}/settings.json"
        isolated = () if config.program else ("-I", "-S")
        told = {
            "packages": "" if config.program else place.folder,
            "mode": config.mode.value,
            "task": place.prompt,
            "model": f"openai/{config.model}",
            "url": f"{place.url}/v1",
            "key": place.token,
            "working_directory": place.working_directory,
            "command_timeout_s": config.command_timeout_s,
        }
        return Launch(
            command=(config.program or config.python, *isolated, driver, *config.arguments, settings),
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
