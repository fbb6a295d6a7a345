"""What each role of a key reaches, over the control API of a real cluster: the rows of the table in docs/attacks.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import orjson
import pytest
from benches.cluster.soak import deploy_api

from headrace.actors.cluster.api.client import ControlClient
from headrace.actors.cluster.runs.contract import RunsApi
from headrace.actors.cluster.runs.records import ActualState, RunRecord
from headrace.actors.errors import ConfigError, RoleTooSmall, RunRefused, RunUnknown
from headrace.actors.run.config import read_recipe
from headrace.actors.telemetry.page.access import digest_of
from support.cluster_rig import API_PORT, LIMITED, QUICK, ROOT, SHARED_ROLE, Cluster
from support.marks import NEEDS_HOSTS
from support.ray_hosts import HEAD

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    *NEEDS_HOSTS,
]
CLUSTER_CPUS: Final = 6
"""The API's replicas take some, and a run must start beside them."""
OWNERS: Final = {"alice": ("alice-read", "alice", "alice-code"), "bob": ("bob",)}
"""Keys of each owner; the key `root` is an admin's."""
NEEDED: Final = "the role code is needed, and this is key"


class Api:
    """The API of a cluster, and what its operator has allowed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.shared = cluster.storage.parent
        self.url = f"http://{cluster.hosts[HEAD].address}:{API_PORT}"
        roles = tuple(f'cluster.roles.{role}="{SHARED_ROLE}"' for role in ("rollout", "engine", "learner"))
        self.recipe = read_recipe(ROOT / "scripts" / "recipes" / "simulated.toml", (*QUICK, *roles))

    def allow(self, text: str) -> None:
        """Write the operator's file, which is read at each request."""
        (self.shared / "quotas.toml").write_text(f"{text}\n[owners.{LIMITED}]\nruns = 1\n", encoding="utf-8")

    def client(self, key: str) -> ControlClient:
        return ControlClient(self.url, key)

    def with_table(self, table: str, **keys: Any) -> dict[str, Any]:
        return {table: self.recipe.get(table, {}) | keys}

    async def submit(self, key: str, name: str, **tables: Any) -> RunRecord:
        async with self.client(key) as client:
            return await client.ask(RunsApi.submit, name, self.recipe | tables, name)

    async def refusal(self, key: str, name: str, **tables: Any) -> str:
        with pytest.raises(RoleTooSmall) as refused:
            await self.submit(key, name, **tables)
        assert NEEDED in str(refused.value)
        assert f"key {digest_of(key).hex()[:12]} (operate) of " in str(refused.value)
        return str(refused.value)

    async def ended(self, key: str, run: RunRecord) -> RunRecord:
        """Return the record of a run that has ended."""
        async with self.client(key) as client:
            async for _ in client.events(run.run_id):
                pass
            return await client.ask(RunsApi.run, run.run_id)

    async def stopped(self, key: str, run: RunRecord) -> RunRecord:
        async with self.client(key) as client:
            await client.ask(RunsApi.stop, run.run_id)
        return await self.ended(key, run)


@pytest.fixture(scope="module")
def api(cluster: Cluster) -> Iterator[Api]:
    deploy_api(cluster)
    first = cluster.submit("simulated.toml", *QUICK, "training.steps=1", name="first", owner="alice")
    api = Api(cluster)
    api.allow("")
    first.wait_for_end()
    yield api
    assert not [name for name in cluster.left_over() if not name.startswith("serve/")]


def service(**keys: Any) -> dict[str, Any]:
    return {"x": {"url": "http://127.0.0.1:9", "retry": {"total_s": 5}} | keys}


async def test_a_key_sees_runs_of_its_owner(api: Api) -> None:
    [first] = [run for run in await seen(api, "alice-read") if run.name == "first"]
    assert first.names_code, "it came with Ray's token"
    for key in OWNERS["alice"]:
        assert first in await seen(api, key)
    assert first in await seen(api, "root")
    assert first not in await seen(api, "bob")
    async with api.client("bob") as bob:
        for method in (RunsApi.run, RunsApi.status, RunsApi.stop, RunsApi.resume):
            with pytest.raises(RunUnknown):
                await bob.ask(method, first.run_id)


async def seen(api: Api, key: str) -> tuple[RunRecord, ...]:
    async with api.client(key) as client:
        return await client.ask(RunsApi.runs)


async def test_only_an_admin_sees_nodes(api: Api) -> None:
    for key in (*OWNERS["alice"], *OWNERS["bob"]):
        async with api.client(key) as client:
            with pytest.raises(RoleTooSmall, match="admin is needed"):
                await client.ask(RunsApi.nodes)
    async with api.client("root") as client:
        assert await client.ask(RunsApi.nodes)


async def test_registered_parts_are_submitted_and_changed_from_operate_on(api: Api) -> None:
    with pytest.raises(RoleTooSmall, match="operate is needed"):
        await api.submit("alice-read", "parts")
    run = await api.submit("alice", "parts")
    assert not run.names_code
    with pytest.raises(RoleTooSmall, match="operate is needed"):
        await api.stopped("alice-read", run)
    assert (await api.stopped("root", run)).actual is ActualState.STOPPED
    async with api.client("alice") as client:
        await client.ask(RunsApi.resume, run.run_id, ("training.steps=2",))
        assert (await api.ended("alice", run)).actual is ActualState.FINISHED
        texts = [event.text async for event in client.events(run.run_id)]
    names = {key: f"key {digest_of(key).hex()[:12]}" for key in ("alice", "root")}
    for text in (
        f"submitted by {names['alice']} (operate)",
        f"stop requested by {names['root']} (admin)",
        f"resumed by {names['alice']} (operate)",
        f"changed by {names['alice']} (operate): training.steps=2",
    ):
        assert text in texts


async def test_code_is_named_from_the_role_code_on(api: Api) -> None:
    """Code runs as Ray's user: it is the reproduction of a fault, in which `operate` was enough."""
    marker = api.shared / "popen"
    called = service(url="", kind="subprocess:Popen", settings={"args": ["touch", str(marker)]})
    text = await api.refusal("alice", "code", services=called)
    assert "services.x.kind 'subprocess:Popen' is an import path" in text
    assert "registered are retriever, model, reward" in text
    for table, keys in (
        ("agent", {"loop": {"judge": {"rule": "os:system"}}}),
        ("environment", {"kind": "os:system"}),
        ("sandbox", {"provider": "os:system"}),
        ("engines", {"sglang": {"python": "/tmp/python"}}),
        ("learner", {"objective": "os:system"}),
        ("learner", {"slime": {"arguments": ["--custom-loss-function-path", "os.system"]}}),
    ):
        await api.refusal("alice", "code", **api.with_table(table, **keys))
    assert not marker.exists()
    with pytest.raises(ConfigError, match="did not return a service"):
        await api.submit("alice-code", "code", services=called)
    assert marker.exists(), "the role code equals Ray's user"


async def test_files_outside_of_listed_folders_are_read_from_the_role_code_on(api: Api) -> None:
    secret, data = api.shared / "secret", api.shared / "data"
    secret.touch(mode=0o600)
    secret.write_text("0123456789abcdef\n")
    data.mkdir()
    for name in ("train", "heldout"):
        evaluator = {"kind": "state", "check": "pass"}
        task = {"id": name, "family": "f", "instruction": f"do {name}", "files": {}, "evaluator": evaluator}
        (data / f"{name}.jsonl").write_bytes(orjson.dumps(task) + b"\n")
    tasks = {name: str(data / f"{name}.jsonl") for name in ("train", "heldout")}
    evaluation = api.recipe["evaluation"] | {"tasks": 1}
    assert "services.x.key_file" in await api.refusal("alice", "files", services=service(key_file=str(secret)))
    assert "`folders` (none)" in await api.refusal("alice", "files", tasks=tasks, evaluation=evaluation)
    api.allow(f'[default]\nfolders = ["{data}"]')
    run = await api.submit("alice", "listed-files", tasks=tasks, evaluation=evaluation)
    await api.stopped("alice", run)
    for name, tables in (("key", {"services": service(key_file=str(secret))}), ("model", {"model": {"path": "/root"}})):
        await api.stopped("alice-code", await api.submit("alice-code", f"any-file-{name}", **tables))


async def test_secrets_are_sent_by_name_and_only_those_of_the_owner(api: Api, cluster: Cluster) -> None:
    for owner in OWNERS:
        folder = api.shared / "secrets" / owner
        folder.mkdir(parents=True)
        (folder / owner).touch(mode=0o600)
        (folder / owner).write_text(f"secret-of-{owner}-0123\n")
    api.allow(f'secrets = "{api.shared / "secrets"}"')
    for key, other in (("alice", "bob"), ("alice-code", "bob"), ("bob", "alice")):
        with pytest.raises(ConfigError, match="no such secret"):
            await api.submit(key, "secret", services=service(key_file=f"secret:{other}"))
    run = await api.submit("alice", "secret", services=service(key_file="secret:alice"))
    config = orjson.loads((cluster.storage / run.run_id / "config.json").read_bytes())
    assert config["services"]["x"]["key_file"] == str(api.shared / "secrets/alice/alice")
    await api.stopped("alice", run)
    # What an operator takes back holds at the next start, whoever resumes the run as it is.
    api.allow("")
    for key in ("alice", "root"):
        async with api.client(key) as client:
            await client.ask(RunsApi.resume, run.run_id)
        failed = await api.ended(key, run)
        assert (failed.actual, "services.x.key_file" in failed.reason) == (ActualState.FAILED, True)


async def test_credentials_of_the_nodes_go_to_listed_addresses(api: Api) -> None:
    mine = {"otlp_endpoint": "http://192.0.2.1:4318/v1/traces"}
    assert "telemetry.otlp_endpoint" in await api.refusal("alice", "credentials", telemetry=mine)
    e2b = api.recipe["sandbox"] | {"e2b": {"api_url": "http://192.0.2.1"}}
    assert "sandbox.e2b.api_url" in await api.refusal("alice", "credentials", sandbox=e2b)
    api.allow('[default]\nurls = ["http://192.0.2.1:4318"]')
    await api.stopped("alice", await api.submit("alice", "listed-address", telemetry=mine))
    api.allow("")
    await api.stopped("alice-code", await api.submit("alice-code", "any-address", telemetry=mine))


async def test_a_run_that_names_code_is_changed_from_the_role_code_on(api: Api) -> None:
    run = await api.submit("alice-code", "changed", model={"path": "/root"})
    assert run.names_code
    await api.stopped("alice", run)
    async with api.client("alice") as alice:
        with pytest.raises(RoleTooSmall, match=r"model\.path"):
            await alice.ask(RunsApi.resume, run.run_id, ("training.steps=2",))
        with pytest.raises(RoleTooSmall, match=r"model\.path"):
            await alice.ask(RunsApi.add_engine, run.run_id, "http://192.0.2.1:1", 1)
        resumed = await alice.ask(RunsApi.resume, run.run_id)
    assert resumed.names_code, "it goes on as it was submitted"
    await api.stopped("alice", run)
    async with api.client("alice-code") as client:
        with pytest.raises(RunRefused, match="resume it first"):
            await client.ask(RunsApi.add_engine, run.run_id, "http://192.0.2.1:1", 1)


def test_every_key_is_of_an_owner(tmp_path: Path) -> None:
    from support.control_rig import KEYS

    assert {key for keys in OWNERS.values() for key in keys} | {"root"} == KEYS.keys()
