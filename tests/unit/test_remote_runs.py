"""The commands for runs of a cluster, over HTTP against a control API."""

from __future__ import annotations

import asyncio
import os
import pwd
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import orjson
import pytest

from headrace.actors.cli import remote_runs
from headrace.actors.cli.app import app
from headrace.actors.cli.cluster_access import ClusterOptions, user_here
from headrace.actors.cli.remote_runs import Event
from headrace.actors.cluster.runs.records import ActualState
from headrace.actors.errors import ConfigError, RunUnknown
from headrace.actors.record.files.log_lines import Wanted
from headrace.actors.run.config import RECIPE_PATHS, named_paths, resolve
from headrace.actors.telemetry.page.access import digest_of
from support.control_rig import ControlRig
from support.runs_without_services import ALICE, serving

RECIPE = '[engines]\nbackend = "simulated"\n[learner]\nkind = "simulated"\n[agent]\nkind = "simulated"\n'
WAIT_S = 30
NOWHERE = ClusterOptions(url="http://127.0.0.1:1", key_file=None)


@pytest.fixture
def rig(tmp_path: Path) -> ControlRig:
    return ControlRig(tmp_path)


@pytest.fixture
async def api(rig: ControlRig, tmp_path: Path) -> AsyncIterator[ClusterOptions]:
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("alice\n")
    async with serving(rig.app) as url:
        yield ClusterOptions(url=url, key_file=key)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


def as_json(event: Event) -> str:
    return orjson.dumps(event).decode()


def command(api: ClusterOptions, *words: str) -> None:
    """Run a command of `headrace` for the runs of the API."""
    app([*words, "--url", api.url, "--key-file", str(api.key_file)], standalone_mode=False)


async def submit(api: ClusterOptions, recipe: Path, name: str = "") -> None:
    code = await asyncio.to_thread(remote_runs.submit_run, api, recipe, name=name, overrides=[], detach=True)
    assert code == 0


async def test_a_detached_run_is_submitted_under_the_name_of_its_recipe(
    rig: ControlRig, api: ClusterOptions, recipe: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    await asyncio.to_thread(
        remote_runs.submit_run, api, recipe, name="", overrides=["training.steps=3"], detach=True, json=out
    )
    [record] = await rig.runs.runs(ALICE)
    assert record.name == "small"
    assert orjson.loads(out.read_bytes())["run_id"] == record.run_id


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_client_that_is_interrupted_only_detaches(
    rig: ControlRig, api: ClusterOptions, recipe: Path, number: signal.Signals
) -> None:
    options = ("--url", api.url, "--key-file", str(api.key_file))
    command = ("-c", "from headrace.actors.cli.app import main; main()", "run", str(recipe), *options)
    client = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=asyncio.subprocess.PIPE)
    assert client.stderr is not None
    try:
        async with asyncio.timeout(4 * WAIT_S):
            # Its first event follows the line about the submission.
            assert b"(small)" in await client.stderr.readline()
            assert await client.stderr.readline()
            client.send_signal(number)
            told = await client.stderr.read()
            assert await client.wait() == 130
    finally:
        if client.returncode is None:
            client.kill()
            await client.wait()
    assert b"detached; the run goes on: headrace status " in told
    [record] = await rig.runs.runs(ALICE)
    assert record.is_live


@pytest.mark.parametrize(
    ("state", "told", "code"),
    [
        (ActualState.FINISHED, 0, 0),
        (ActualState.FAILED, 75, 75),
        (ActualState.FAILED, None, 1),
        (ActualState.STOPPED, None, 4),
    ],
)
async def test_a_followed_run_gives_its_events_and_exit_code(
    rig: ControlRig,
    api: ClusterOptions,
    recipe: Path,
    capsys: pytest.CaptureFixture[str],
    state: ActualState,
    told: int | None,
    code: int,
) -> None:
    await submit(api, recipe)
    [record] = await rig.runs.runs(ALICE)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        following = tasks.create_task(asyncio.to_thread(remote_runs.follow_run, api, "small"))
        await rig.runs.go(record.run_id, ActualState.RUNNING, "first step")
        await rig.runs.go(record.run_id, state, "the end", exit_code=told)
    assert following.result() == code
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("UTC")[1].split(maxsplit=1) for line in lines[1:5]] == [
        ["waiting", f"submitted by key {digest_of('alice').hex()[:12]} (operate)"],
        ["starting", "starting"],
        ["running", "first step"],
        [state.value, "the end"],
    ]
    assert lines[5] == f"run {record.run_id} (small): {state} (the end)"


async def test_a_followed_run_shows_the_warnings_of_its_actors_once(
    rig: ControlRig, api: ClusterOptions, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await submit(api, recipe)
    [record] = await rig.runs.runs(ALICE)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        following = tasks.create_task(asyncio.to_thread(remote_runs.follow_run, api, "small"))
        await rig.runs.go(record.run_id, ActualState.RUNNING, "node 10.0.0.1 is lost")
        await rig.runs.go(record.run_id, ActualState.STOPPED, "node 10.0.0.2 is lost")
    assert following.result() == 4
    printed = capsys.readouterr().err
    assert printed.count("warning of service: node 10.0.0.1 is lost") == 1
    assert f"1 more warnings: headrace logs {record.run_id} --url {api.url}" in printed


async def test_runs_are_changed_and_shown_by_name(
    rig: ControlRig, api: ClusterOptions, recipe: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    await submit(api, recipe)
    [record] = await rig.runs.runs(ALICE)

    def session() -> None:
        command(api, "engine", "add", "http://h:1", "--run", "small", "--timeout-s", "5")
        command(api, "status", "small", "--engines", "--json", str(tmp_path / "engines.json"))
        command(api, "engine", "remove", "added-1", "--run", "small", "--timeout-s", "5")
        command(api, "stop", "small")
        command(api, "resume", record.run_id, "--set", "training.steps=2")
        command(api, "stop", "small", "--now", "--json", str(tmp_path / "stopped.json"))
        command(api, "status")
        command(api, "status", "--json", str(tmp_path / "runs.json"))
        command(api, "status", "small")
        command(api, "status", "small", "--json", str(tmp_path / "status.json"))
        command(api, "report", "small")
        remote_runs.print_logs(api, "small", Wanted(actor="service"), follow=True, render=as_json)
        command(api, "status", "small", "--events", "--after", "1")

    await asyncio.to_thread(session)
    printed = capsys.readouterr()
    assert orjson.loads((tmp_path / "engines.json").read_bytes())["engines"][0]["url"] == "http://h:1"
    assert orjson.loads((tmp_path / "stopped.json").read_bytes())["actual"] == "stopped"
    assert [run["name"] for run in orjson.loads((tmp_path / "runs.json").read_bytes())] == ["small"]
    assert orjson.loads((tmp_path / "status.json").read_bytes()) == {"run": "small", "state": "stopped"}
    assert "added-1: added" in printed.err
    assert "drained, should be drained" in printed.err
    assert f"{record.run_id}  small  alice  stopped" in printed.err
    report, rest = printed.out[: printed.out.index("}") + 1], printed.out[printed.out.index("}") + 2 :].splitlines()
    assert orjson.loads(report) == {"steps": 0}
    events = [event.number for event in (await rig.runs.events(ALICE, record.run_id, 0, 0.0)).events]
    assert [orjson.loads(line)["number"] for line in rest] == events + events[1:]


async def test_the_newest_run_of_a_name_is_meant(rig: ControlRig, api: ClusterOptions, recipe: Path) -> None:
    for _ in range(2):
        await submit(api, recipe, "a")
        await asyncio.to_thread(command, api, "stop", "a", "--now")
    await submit(api, recipe, "a")
    await asyncio.to_thread(command, api, "stop", "a")
    assert [record.actual.value for record in await rig.runs.runs(ALICE)] == ["stopped", "stopped", "drained"]
    with pytest.raises(RunUnknown, match="headrace status"):
        await asyncio.to_thread(command, api, "stop", "b")


@pytest.mark.parametrize("path", RECIPE_PATHS, ids=".".join)
def test_relative_paths_are_refused(tmp_path: Path, path: tuple[str, ...]) -> None:
    key = ".".join(path)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    with pytest.raises(ConfigError, match=rf"{key} 'data' is relative: .* --set {key}=/|{key} 'data' is relative"):
        NOWHERE.document(recipe, [f"{key}=data"])
    absolute = NOWHERE.document(recipe, [f"{key}=/data"])
    value: object = absolute
    for part in path:
        assert isinstance(value, dict)
        value = value[part]
    assert value == "/data"


def test_exactly_the_relative_paths_of_a_recipe_are_known(tmp_path: Path) -> None:
    """A local run makes the same keys absolute."""
    document = {
        "model": {"path": "data"},
        "tasks": {"train": "data", "heldout": "data"},
        "engines": {"key_file": "data"},
        "environment": {"retail": {"data": "data", "policy": "data", "tools": "data"}},
        "learner": {"slime": {"slime_dir": "data", "megatron_dir": "data"}},
        "services": {
            "wiki": {"kind": "retriever", "corpus": "data", "key_file": "data"},
            "helper": {"kind": "model", "path": "data", "engine": {"backend": "sglang", "python": "data"}},
        },
    }
    retail = {"retail": {"data": "data", "policy": "data", "tools": "data"}}
    source = {"name": "one", "share": 1.0, "train": "data", "heldout": "data", "environment": retail}
    of_sources = {"model": {"path": "/model"}, "tasks": {"sources": [source]}}
    found = []
    for each in (document, of_sources):
        config = resolve(each, tmp_path / "recipe.toml", tmp_path / "run")
        found += [
            path for path in named_paths(config.model_dump(mode="json")) if path[0] != "model.path" or each is document
        ]
    assert {table[key] for _, table, key in found} == {str(tmp_path / "data")}
    assert len(found) == len(RECIPE_PATHS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps = 3", "steps must be a table"),
        ("[model]\nmade = 2026-01-01\n[x", "not valid TOML"),
        ("[training]\nsteps = 99999999999999999999", "JSON cannot express"),
    ],
)
def test_recipes_that_cannot_be_sent_are_refused(tmp_path: Path, text: str, message: str) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(text)
    with pytest.raises(ConfigError, match=message):
        NOWHERE.document(recipe, [])


def test_a_user_without_an_account_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    assert user_here() == pwd.getpwuid(os.getuid()).pw_name

    def unknown(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert user_here() == f"uid-{os.getuid()}"


def test_a_key_file_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="HEADRACE_KEY_FILE"):
        remote_runs.show_runs(NOWHERE)
