"""Runs mini-swe-agent on one task, with its default agent, local environment and configuration files.

Runs as the user of the agent: `python -I -S driver.py SETTINGS`, where SETTINGS is a JSON file. Prints each message as
a line of JSON, truncated at 2,000 characters; the last line is the result. The exit code is 0 unless the agent raised
an exception, and 127 if its packages are missing. The package path stays in this process, since the policy's commands
must not see it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

MOST_CHARACTERS = 2000
TIMEOUT_S = 3600
"""Timeout of one request; the gateway enforces the real limits."""


def say(kind: str, **fields: Any) -> None:
    sys.stdout.write(json.dumps({"type": kind, **fields}) + "\n")
    sys.stdout.flush()


def find_packages(folder: str) -> None:
    """Add the packages for this Python version to the module path."""
    version = "{}.{}".format(*sys.version_info)
    packages = os.path.join(folder, "py" + version)
    if not os.path.isdir(packages):
        there = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        fix = f"install it for {version} (guide 'Agents'), or set agent.mini_swe_agent.python"
        sys.stderr.write(f"no packages for Python {version} (installed: {there}): {fix}\n")
        sys.exit(127)
    sys.path.insert(0, packages)


def model_and_settings(job: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the mode's model class and its configuration."""
    text = job["mode"] == "text"
    name = "litellm_textbased_model.LitellmTextbasedModel" if text else "litellm_model.LitellmModel"
    module, _, kind = name.partition(".")
    config = importlib.import_module("minisweagent.config")
    settings = config.get_config_from_spec("mini_textbased.yaml" if text else "mini.yaml")
    return getattr(importlib.import_module("minisweagent.models." + module), kind), settings


def make_agent(job: dict[str, Any]) -> Any:
    model_class, settings = model_and_settings(job)
    default = importlib.import_module("minisweagent.agents.default")
    local = importlib.import_module("minisweagent.environments.local")

    class Agent(default.DefaultAgent):  # type: ignore[misc, name-defined]
        def add_messages(self, *messages: Any) -> Any:
            for message in messages:
                say("message", role=message.get("role"), content=str(message.get("content"))[:MOST_CHARACTERS])
            return super().add_messages(*messages)

    access = {"api_base": job["url"], "api_key": job["key"], "timeout": TIMEOUT_S}
    settings["model"].update(model_name=job["model"], cost_tracking="ignore_errors")
    settings["model"].setdefault("model_kwargs", {}).update(access)
    settings["environment"].update(cwd=job["working_directory"], timeout=job["command_timeout_s"])
    limits = {"step_limit": 0, "cost_limit": 0.0}
    templates = {name: settings["agent"][name] for name in ("system_template", "instance_template")}
    environment = local.LocalEnvironment(**settings["environment"])
    return Agent(model_class(**settings["model"]), environment, **templates, **limits)


def main(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        job = json.load(file)
    if job["packages"]:
        find_packages(job["packages"])
    agent = make_agent(job)
    try:
        ended = agent.run(job["task"])
    except Exception as error:  # noqa: BLE001 - any exception is an end of the agent
        say("result", status=type(error).__name__, result=str(error)[:MOST_CHARACTERS], turns=agent.n_calls)
        return 1
    result = str(ended.get("submission") or "")[:MOST_CHARACTERS]
    say("result", status=str(ended.get("exit_status")), result=result, turns=agent.n_calls)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[-1]))
