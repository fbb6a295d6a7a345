"""Harbor beside the gateway: terminus-2 collects the ids that the engine served, and Harbor's own models accept the
exports. `scripts/install harbor` installs it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headrace.serve.gateway.capture.session import Budgets
from headrace.serve.gateway.exports.export_form import ExportForm
from support.gateway_rig import CHAT, Lines, World, call_text, soon, world
from support.installed_programs import installed
from support.scripted_engine import Fault

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
INSTALL_S = 400
RUN_S = 180
QUIET = {"HARBOR_TELEMETRY": "off", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
TASK = """\
schema_version = "1.4"
[task]
name = "own/two"
[environment]
docker_image = "none"
"""
GRADE = """\
#!/bin/bash
if [ "$(cat "$HOST_ROOT/app/answer")" = 2 ]; then echo 1; else echo 0; fi > "$HOST_ROOT/logs/verifier/reward.txt"
"""
READ = """\
import json, sys
from pydantic import TypeAdapter
from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail
from harbor.models.trajectories import Trajectory
form, path = sys.argv[1:]
text = open(path).read()
if form == "atif":
    print(json.dumps(Trajectory.model_validate_json(text).to_json_dict()))
else:
    details = TypeAdapter(list[RolloutDetail]).validate_json(text)
    print(json.dumps(AgentContext(rollout_details=details).model_dump()["rollout_details"]))
"""


@pytest.fixture(scope="module")
def harbor() -> Path:
    """Harbor's program, installed into the user's cache if necessary."""
    return installed("harbor", timeout_s=INSTALL_S)


def read_by_harbor(harbor: Path, form: str, path: Path) -> tuple[Any, str]:
    """Return the document as Harbor's models have it, or None and the error."""
    command = [harbor.with_name("python"), "-c", READ, form, path]
    read = subprocess.run(command, env=os.environ | QUIET, capture_output=True, text=True, timeout=RUN_S, check=False)
    return (json.loads(read.stdout) if read.returncode == 0 else None), read.stderr


def files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


async def play_everything(w: World) -> None:
    """Calls, reasoning, a subagent, an edited history, a dropped answer, a cut turn and a session without turns."""
    client = await w.client(tools=("bash", "edit"))
    reply = await client.say("mend it")
    reply = await client.give((reply.calls[0][0], "a.txt"))
    await client.give((reply.calls[0][0], "done"), (reply.calls[1][0], ""))
    whole = list(client.history)
    await client.say("and on")
    # The agent goes on from an earlier point, twice.
    client.history = [*whole, *CHAT.user("otherwise")]
    await client.send(client.body())
    client.history = CHAT.user("another task")
    await client.send(client.body())
    w.engines[0].script = Lines(Fault.HANG)
    w.engines[0].asked.clear()
    cut = asyncio.ensure_future(client.send(client.body(messages=CHAT.user("a third task"))))
    await soon(w.engines[0].asked)
    await w.finish()
    await cut
    await w.open("empty")
    await w.finish("empty")


TURNS = (
    "<think>\nI should look.\n</think>\n\nI look.\n" + call_text("bash", command="ls  é"),
    call_text("bash", command="a") + "\n" + call_text("edit", path="x", replace_all=False),
    "Half of it is done.",
    "All of it.",
)


async def exported_to(folder: Path, model_dir: Path, form: ExportForm) -> list[Path]:
    """Play everything; return the files of the exports."""
    async with world(model_dir, Lines(*TURNS), export_dir=folder, export_form=form) as w:
        await play_everything(w)
    return files(folder)


async def test_harbors_trajectory_accepts_every_export(harbor: Path, model_dir: Path, tmp_path: Path) -> None:
    paths = await exported_to(tmp_path, model_dir, ExportForm.ATIF)
    assert [path.name for path in paths] == ["empty.json", "rollout-1.json"]
    masked = set()
    for path in paths:
        ours = trajectories(json.loads(path.read_bytes()))
        read, error = read_by_harbor(harbor, "atif", path)
        assert read is not None, error
        assert read["schema_version"] == "ATIF-v1.8"
        for one, theirs in zip(ours, trajectories(read), strict=True):
            for name in ("source", "message", "metrics", "tool_calls", "observation", "reasoning_content"):
                assert [step.get(name) for step in theirs["steps"]] == [step.get(name) for step in one["steps"]]
            masked |= {step["extra"]["masked"] for step in one["steps"] if "extra" in step}
    assert {None, "abandoned", "aborted"} <= masked


async def test_harbors_rollout_detail_accepts_every_export(harbor: Path, model_dir: Path, tmp_path: Path) -> None:
    for path in await exported_to(tmp_path, model_dir, ExportForm.ROLLOUT_DETAILS):
        read, error = read_by_harbor(harbor, "rollout-details", path)
        assert read is not None, error
        assert read == json.loads(path.read_bytes())


def trajectories(document: Any) -> list[Any]:
    return [document, *document.get("subagent_trajectories", [])]


async def test_harbors_models_refuse_what_is_no_trajectory(harbor: Path, model_dir: Path, tmp_path: Path) -> None:
    async with world(model_dir, Lines("Well."), export_dir=tmp_path, export_form=ExportForm.ATIF) as w:
        await (await w.client()).say("go")
        await w.finish()
    path = tmp_path / "rollout-1.json"
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps(document | {"steps": [step | {"step_id": 7} for step in document["steps"]]}))
    theirs, error = read_by_harbor(harbor, "atif", path)
    assert theirs is None
    assert "expected 1" in error


@pytest.mark.skipif(shutil.which("tmux") is None, reason="terminus-2 works in tmux, which is not installed here")
async def test_terminus_2_collects_the_ids_that_the_engine_served(
    harbor: Path, model_dir: Path, tmp_path: Path
) -> None:
    task, jobs = tmp_path / "task", tmp_path / "jobs"
    written = {"task.toml": TASK, "instruction.md": "Write 2 to the file answer.", "tests/test.sh": GRADE}
    for folder in ("tests", "environment"):
        (task / folder).mkdir(parents=True)
    for name, text in written.items():
        (task / name).write_text(text)
    write = {"analysis": "é", "plan": "write", "commands": [{"keystrokes": "echo 2 > answer\n", "duration": 0.1}]}
    stop = {"analysis": "done", "plan": "stop", "commands": [], "task_complete": True}
    lines = Lines("<think>\nHm.\n</think>\n\n" + json.dumps(write), json.dumps(stop), json.dumps(stop))
    async with world(model_dir, lines, export_dir=tmp_path / "out", export_form=ExportForm.ROLLOUT_DETAILS) as w:
        base_url = await w.open(budgets=Budgets(max_tokens_per_turn=4000, max_context_tokens=32_000))
        settings = {
            "api_base": f"{base_url}/v1",
            "collect_rollout_details": "true",
            "record_terminal_session": "false",
            "model_info": json.dumps({"max_input_tokens": 32_000, "max_output_tokens": 4000}),
        }
        process = await asyncio.create_subprocess_exec(
            *(str(harbor), "run", "-p", str(task), "-a", "terminus-2", "-m", "openai/policy", "-o", str(jobs)),
            *("-e", "harbor_host:HostEnvironment", "--job-name", "job", "-y"),
            *(argument for name, value in settings.items() for argument in ("--ak", f"{name}={value}")),
            env=os.environ | QUIET | {"OPENAI_API_KEY": "any", "PYTHONPATH": str(Path(__file__).parent)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        async with asyncio.timeout(RUN_S):
            said, _ = await process.communicate()
        sampled = w.engines[0].sampled
        prompts, outputs = [list(one.prompt_ids) for one in sampled], w.engines[0].outputs()
        logprobs = [list(one.logprobs) for one in sampled]
        report = await w.finish()
    [exported] = json.loads((tmp_path / "out" / "rollout-1.json").read_bytes())
    [trial] = (folder for folder in files(jobs / "job") if folder.is_dir())
    result = json.loads((trial / "result.json").read_bytes())
    trajectory = json.loads((trial / "agent" / "trajectory.json").read_bytes())
    assert result["exception_info"] is None, said.decode()
    assert result["verifier_result"]["rewards"] == {"reward": 1.0}
    assert len(outputs) == 3
    [detail] = result["agent_result"]["rollout_details"]
    assert detail["prompt_token_ids"] == prompts
    assert detail["completion_token_ids"] == outputs
    assert detail["logprobs"] == logprobs
    own = [step["metrics"] for step in trajectory["steps"] if step["source"] == "agent"]
    assert [one["prompt_token_ids"] for one in own] == prompts
    assert [one["completion_token_ids"] for one in own] == outputs
    # What the agent collected is what the gateway exports, and what it trains.
    for name in ("prompt_token_ids", "completion_token_ids", "logprobs"):
        assert exported[name] == detail[name]
    assert (report.trained_tokens, report.masked) == (sum(map(len, outputs)), {})
