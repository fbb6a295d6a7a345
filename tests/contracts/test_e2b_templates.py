"""Templates of the E2B server: both SDKs' `Template.build`, owners, quotas, tags, restarts and hostile requests."""

from __future__ import annotations

import asyncio
import io
import json
import os
import shutil
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from contracts.conftest import Wire
from e2b import AsyncSandbox, AsyncTemplate, Template
from e2b.exceptions import BuildException, SandboxException

from headrace.sandboxes.images.build_steps import BuildLimits
from headrace.sandboxes.images.builder import ImageBuilder
from headrace.sandboxes.images.catalog import ImageCatalog
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.serve.sandbox_servers.e2b.server import E2bServer, ServerSettings
from headrace.serve.sandbox_servers.e2b_state.images import ImageMap
from headrace.serve.sandbox_servers.e2b_state.keys import load_keys
from support.installed_programs import installed

pytestmark = pytest.mark.namespaces
KEYS = "one:first\ntwo:second\nsmall:third:1\n"
NODE_CHECK = Path(__file__).parent / "sdks" / "template_checks.mjs"


@pytest_asyncio.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(LocalSandboxConfig(image_folder=tmp_path / "images")) as provider:
        yield provider


@asynccontextmanager
async def serving(
    provider: LocalProvider, folder: Path, limits: BuildLimits | None = None, **settings: Any
) -> AsyncIterator[E2bServer]:
    keys = folder / "keys"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    images = ImageMap({"ubuntu:22.04": "host"})
    chosen = ServerSettings(images=images, state_folder=folder / "state", keys=load_keys(keys), **settings)
    async with E2bServer(provider, chosen, builder=ImageBuilder(provider, limits=limits)) as server:
        yield server


@pytest_asyncio.fixture
async def server(provider: LocalProvider, tmp_path: Path) -> AsyncIterator[E2bServer]:
    async with serving(provider, tmp_path) as server:
        yield server


@pytest_asyncio.fixture
async def wires(server: E2bServer) -> AsyncIterator[dict[str, Wire]]:
    """A client for each key."""
    async with aiohttp.ClientSession() as http:
        yield {key: Wire(url=server.url, http=http, key=key) for key in ("first", "second", "third")}


def options(server: E2bServer, key: str = "first") -> dict[str, Any]:
    return {"api_url": server.url, "sandbox_url": server.url, "api_key": key, "validate_api_key": False}


async def build(wire: Wire, name: str, wait: bool = True, **body: Any) -> dict[str, Any]:
    """Request and start a build on the bare wire; return the last status, or the error of the start."""
    status, made, _ = await wire.call("POST", "/v3/templates", {"name": name})
    assert status == 202, made
    path = f"{made['templateID']}/builds/{made['buildID']}"
    order = {"fromImage": "ubuntu:22.04", "steps": [], "force": False, **body}
    status, answer, _ = await wire.call("POST", f"/v2/templates/{path}", order)
    if status != 202:
        return {"status": status, **answer, "path": path}
    while wait:
        _, answer, _ = await wire.call("GET", f"/templates/{path}/status?logsOffset=0")
        if answer["status"] in ("ready", "error"):
            return {**answer, "path": path}
        await asyncio.sleep(0.02)
    return {"path": path}


def run(*commands: str) -> list[dict[str, Any]]:
    return [{"type": "RUN", "args": [command], "force": False} for command in commands]


async def test_the_sdk_builds_and_boots_a_template(server: E2bServer, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("in sub\n")
    (tmp_path / "a.txt").write_text("a\n")
    template = (
        Template(file_context_path=str(tmp_path))
        .from_image("ubuntu:22.04")
        .copy("a.txt", "/opt/a.txt", mode=0o640)
        .copy("sub", "sub")
        .set_envs({"GREETING": "hello there"})
        .run_cmd(["whoami > who", "pwd >> who"])
        .run_cmd("id -un > /opt/root", user="root")
        .make_dir("/home/user/w/deep")
        .set_workdir("/home/user/w")
        .set_start_cmd("touch /tmp/started; sleep 100", "test -e /tmp/started")
    )
    lines: list[str] = []
    to = options(server)
    built = await AsyncTemplate.build(template, "mine", on_build_logs=lambda one: lines.append(one.message), **to)
    assert any("RUN whoami > who && pwd >> who" in line for line in lines)
    assert await AsyncTemplate.exists("mine", **to)
    for name in ("mine", built.template_id):
        box = await AsyncSandbox.create(name, **to)
        said = await box.commands.run(
            "cat /opt/a.txt /opt/root ~/who ~/sub/file; pwd; echo $GREETING; ls -d deep /tmp/started"
        )
        assert said.stdout == ("a\nroot\nagent\n/home/user\nin sub\n/home/user/w\nhello there\n/tmp/started\ndeep\n")
        [command] = await box.commands.list()
        assert command.tag == "start_cmd"
        await box.kill()
    again = await AsyncTemplate.build(template, "mine", on_build_logs=lambda one: lines.append(one.message), **to)
    assert again.template_id == built.template_id
    assert any("0 layers" in line for line in lines)


async def test_the_sdk_converts_a_dockerfile(server: E2bServer, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("f\n")
    text = "FROM ubuntu:22.04\nENV A=1\nWORKDIR /app\nCOPY --chown=agent f .\nRUN echo $A > a\nUSER agent\n"
    to = options(server)
    await AsyncTemplate.build(Template(file_context_path=str(tmp_path)).from_dockerfile(text), "docker", **to)
    box = await AsyncSandbox.create("docker", **to)
    said = await box.commands.run("pwd; whoami; cat a; stat -c %U f a")
    assert said.stdout == "/app\nagent\n1\nagent\nroot\n"
    # Nobody is named, so root writes for the default user.
    await box.files.write("/srv/new/file", "x")
    assert (await box.commands.run("stat -c %U /srv/new /srv/new/file")).stdout == "agent\nagent\n"
    await box.commands.run("ln -s /etc/passwd /tmp/link")
    with pytest.raises(SandboxException, match="Permission denied"):
        await box.files.write("/tmp/link", "x")


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (Template().from_image("nobody/has:this"), "FROM nobody/has:this"),
        (Template().from_image("/etc"), "FROM /etc"),
        (Template().from_template("not-mine"), "not-mine"),
        (Template().from_image("ubuntu:22.04").run_cmd("echo oops; exit 7"), "exit code 7"),
        (Template().from_image("ubuntu:22.04").set_user("nobody-here").run_cmd("true"), "nobody-here"),
        (Template().from_image("x", username="u", password="p"), "fromImageRegistry"),
    ],
)
async def test_a_build_that_cannot_be_leaves_nothing(
    server: E2bServer, provider: LocalProvider, template: Any, said: str
) -> None:
    with pytest.raises(BuildException) as raised:
        await AsyncTemplate.build(template, "bad", **options(server))
    assert said in str(raised.value)
    assert not await AsyncTemplate.exists("bad", **options(server))
    assert ImageCatalog(provider.store.files).all() == []
    assert await provider.list() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_node_sdk_builds_a_template(server: E2bServer, tmp_path: Path) -> None:
    if shutil.which("node") is None:
        pytest.skip("the SDK for Node needs node, and there is none here")
    folder = await asyncio.to_thread(installed, "e2b_node", timeout_s=600)
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "checks.mjs").write_bytes(NODE_CHECK.read_bytes())
    (tmp_path / "node_modules").symlink_to(folder / "node_modules")
    process = await asyncio.create_subprocess_exec(
        *("node", str(tmp_path / "checks.mjs")),
        cwd=tmp_path,
        env=os.environ | {"E2B_API_URL": server.url, "E2B_SANDBOX_URL": server.url, "E2B_API_KEY": "first"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    async with asyncio.timeout(120):
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    found = json.loads(said.splitlines()[-1])
    assert found == {"before": False, "after": True, "stdout": "a\nnode\nagent\n/home/user\n", "tags": ["default"]}


async def test_templates_belong_to_their_owner(wires: dict[str, Wire], provider: LocalProvider) -> None:
    one, two = wires["first"], wires["second"]
    mine = await build(one, "shared-name", steps=run("echo one > /tmp/of"))
    other = await build(two, "shared-name", steps=run("echo two > /tmp/of"))
    assert mine["templateID"] != other["templateID"]
    for wire, said in ((one, b"one\n"), (two, b"two\n")):
        box = await wire.create(templateID="shared-name")
        assert (await box.run("cat /tmp/of"))[0] == said
    paths = [
        ("GET", f"/templates/{mine['templateID']}", None),
        ("DELETE", f"/templates/{mine['templateID']}", None),
        ("GET", f"/templates/{mine['templateID']}/tags", None),
        ("GET", f"/templates/{mine['templateID']}/files/{'0' * 64}", None),
        ("GET", f"/templates/{mine['path']}/status", None),
        ("GET", f"/templates/{mine['path']}/logs", None),
        ("POST", f"/v2/templates/{mine['path']}", {"fromImage": "ubuntu:22.04"}),
        ("POST", "/templates/tags", {"target": mine["templateID"], "tags": ["x"]}),
        ("GET", "/templates/aliases/only-mine", None),
    ]
    await build(one, "only-mine")
    for method, path, body in paths:
        assert (await two.call(method, path, body))[0] == 404, path
    assert (await two.call("POST", "/v2/sandboxes", {"templateID": mine["templateID"]}))[0] == 400
    assert (await build(two, "thief", fromImage="", fromTemplate="only-mine"))["status"] == 400
    status, listed, _ = await two.call("GET", "/templates")
    assert (status, [row["names"] for row in listed]) == (200, [["shared-name"]])
    # Names of the catalogue that builds use are no client's.
    [image, *_] = ImageCatalog(provider.store.files).all()
    for name in (image.name, f"image:{image.name}", "image:x", "built:" + "0" * 64):
        assert (await one.call("POST", "/v2/sandboxes", {"templateID": name}))[0] == 400, name
        assert (await build(one, "via-image", fromImage=name))["status"] == 400, name


async def test_a_build_begins_with_the_catalogue_or_an_own_template(
    wires: dict[str, Wire], provider: LocalProvider
) -> None:
    wire = wires["first"]
    assert (await build(wire, "first-one", steps=run("echo below > /tmp/below")))["status"] == "ready"
    catalog = ImageCatalog(provider.store.files)
    [image] = catalog.all()
    catalog.put(replace(image, name="public"))
    for name, body in (("a", {"fromImage": "public"}), ("b", {"fromImage": "", "fromTemplate": "first-one"})):
        done = await build(wire, name, steps=run("cat /tmp/below; echo above > /tmp/above"), **body)
        assert done["status"] == "ready", done
        # The names and references of the operator are not the client's to see.
        assert done["logEntries"][0]["message"] == f"FROM {body['fromImage'] or body['fromTemplate']}"
        assert "templates/" not in json.dumps(done["logEntries"])
        box = await wire.create(templateID=name)
        assert (await box.run("cat /tmp/below /tmp/above"))[0] == b"below\nabove\n"


async def test_names_of_the_image_map_cannot_be_taken(wires: dict[str, Wire]) -> None:
    for name in ("base", "templates/x", "", "a b", "../x", "x" * 200, "a:b:c"):
        status, body, _ = await wires["first"].call("POST", "/v3/templates", {"name": name})
        assert (status, body["code"]) == (400, 400), name


async def test_a_build_counts_as_a_sandbox(wires: dict[str, Wire], provider: LocalProvider) -> None:
    small = wires["third"]
    started = await build(small, "slow", wait=False, steps=run("while [ ! -e /tmp/go ]; do sleep 0.05; done"))
    status, body, _ = await small.call("POST", "/v2/sandboxes", {"templateID": "base"})
    assert (status, "limit of 1" in body["message"]) == (429, True)
    assert (await build(small, "other"))["status"] == 429
    template_id = started["path"].partition("/")[0]
    # Deleting a template ends its build, which then counts no longer.
    assert (await small.call("DELETE", f"/templates/{template_id}"))[0] == 204
    # A boot that was cancelled ends on its own.
    async with asyncio.timeout(20):
        while await provider.list():  # noqa: ASYNC110 - the launcher has no event for it
            await asyncio.sleep(0.02)
    assert (await small.call("GET", f"/templates/{started['path']}/status"))[0] == 404
    await small.create()


async def test_a_full_key_starts_no_build(wires: dict[str, Wire]) -> None:
    small = wires["third"]
    box = await small.create()
    assert (await build(small, "refused"))["status"] == 429
    assert (await small.call("GET", "/templates/aliases/refused"))[0] == 404
    await small.call("DELETE", f"/sandboxes/{box.id}")
    done = await build(small, "fits", steps=run("true"))
    assert done["status"] == "ready", done


async def test_a_quota_that_is_exceeded_during_a_build_ends_it(provider: LocalProvider, tmp_path: Path) -> None:
    async with serving(provider, tmp_path, max_template_bytes=2 << 20) as server, aiohttp.ClientSession() as http:
        wire = Wire(url=server.url, http=http, key="first")
        assert (await build(wire, "fits", steps=run("true")))["status"] == "ready"
        steps = run("head -c 1M /dev/zero > /tmp/one", "head -c 2M /dev/zero > /tmp/two", "echo never")
        done = await build(wire, "large", steps=steps)
        assert (done["status"], done["reason"]["step"]) == ("error", "2"), done
        assert "quota" in done["reason"]["message"]
        assert not any(line["message"] == "never" for line in done["logEntries"])
        assert (await wire.call("GET", "/templates/aliases/large"))[0] == 404
        assert [image.name.split("/")[0] for image in ImageCatalog(provider.store.files).all()] == ["templates"]
        assert await provider.list() == []
        # A failed build counts no longer.
        assert (await build(wire, "fits", steps=run("true")))["status"] == "ready"


async def test_tags_name_builds(wires: dict[str, Wire], provider: LocalProvider) -> None:
    wire = wires["first"]
    first = await build(wire, "tagged:v1", steps=run("echo 1 > /tmp/v"))
    await build(wire, "tagged:v2", steps=run("echo 2 > /tmp/v"))
    status, body, _ = await wire.call("POST", "/templates/tags", {"target": "tagged:v1", "tags": ["default", "stable"]})
    assert (status, body["tags"], body["buildID"]) == (201, ["default", "stable"], first["buildID"])
    for name, said in (("tagged", b"1\n"), ("tagged:stable", b"1\n"), ("tagged:v2", b"2\n")):
        box = await wire.create(templateID=name)
        assert (await box.run("cat /tmp/v"))[0] == said
    assert (await wire.call("POST", "/v2/sandboxes", {"templateID": "tagged:v3"}))[0] == 400
    assert len(ImageCatalog(provider.store.files).all()) == 2
    assert (await wire.call("DELETE", "/templates/tags", {"name": "tagged", "tags": ["v2"]}))[0] == 204
    assert len(ImageCatalog(provider.store.files).all()) == 1
    all_tags = {"name": "tagged", "tags": ["v1", "default", "stable"]}
    assert (await wire.call("DELETE", "/templates/tags", all_tags))[0] == 400
    _, rows, _ = await wire.call("GET", "/templates/tagged/tags")
    assert {row["tag"] for row in rows} == {"v1", "default", "stable"}
    assert (await wire.call("DELETE", "/templates/tagged"))[0] == 204
    assert ImageCatalog(provider.store.files).all() == []


async def test_templates_survive_a_restart(provider: LocalProvider, tmp_path: Path) -> None:
    async with aiohttp.ClientSession() as http:
        async with serving(provider, tmp_path) as server:
            wire = Wire(url=server.url, http=http, key="first")
            done = await build(wire, "kept", steps=run("echo kept > /tmp/k"))
            await build(wire, "half", wait=False, steps=run("sleep 100"))
        async with serving(provider, tmp_path) as server:
            wire = Wire(url=server.url, http=http, key="first")
            status, body, _ = await wire.call("GET", f"/templates/{done['path']}/status")
            assert (status, body["status"]) == (200, "ready")
            assert (await wire.call("GET", "/templates/aliases/half"))[0] == 404
            box = await wire.create(templateID="kept")
            assert (await box.run("cat /tmp/k"))[0] == b"kept\n"


def packed(*names: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:gz") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 1
            archive.addfile(info, io.BytesIO(b"x"))
    return data.getvalue()


async def test_uploads_are_checked(provider: LocalProvider, tmp_path: Path) -> None:
    limits = BuildLimits(layer_bytes=1 << 20)
    async with serving(provider, tmp_path, limits) as server, aiohttp.ClientSession() as http:
        one, two = (Wire(url=server.url, http=http, key=key) for key in ("first", "second"))
        _, made, _ = await one.call("POST", "/v3/templates", {"name": "t"})
        files = f"/templates/{made['templateID']}/files"

        async def put(data: bytes, digest: str = "a" * 64) -> tuple[int, bool]:
            status, offer, _ = await one.call("GET", f"{files}/{digest}")
            assert status == 201, offer
            async with http.put(offer["url"], data=io.BytesIO(data)) as response:
                stored = response.status
            return stored, (await one.call("GET", f"{files}/{digest}"))[1]["present"]

        assert await put(packed("../../out")) == (400, False)
        assert await put(packed("/out")) == (400, False)
        assert await put(b"no archive") == (400, False)
        assert await put(os.urandom(2 << 20)) == (413, False)
        assert await put(packed("fine")) == (200, True)
        assert (await one.call("GET", f"{files}/zz"))[0] == 400
        assert (await http.put(f"{server.url}/templates/uploads/guess", data=b"")).status == 403
        # What one key has uploaded is not there for another.
        _, theirs, _ = await two.call("POST", "/v3/templates", {"name": "t"})
        _, offer, _ = await two.call("GET", f"/templates/{theirs['templateID']}/files/{'a' * 64}")
        assert offer["present"] is False
        copy = {"type": "COPY", "args": ["fine", "/fine"], "filesHash": "a" * 64}
        assert (await build(two, "t", steps=[copy]))["reason"]["step"] == "1"
        assert (await build(one, "t", steps=[copy]))["status"] == "ready"
        assert await asyncio.to_thread(lambda: list(tmp_path.rglob("out"))) == []


async def test_requests_outside_the_subset_are_refused(wires: dict[str, Wire]) -> None:
    wire = wires["first"]
    bad: list[dict[str, Any]] = [
        {"steps": [{"type": "VOLUME", "args": ["/x"]}]},
        {"steps": run(*["true"] * 101)},
        {"steps": [{"type": "RUN", "args": [7]}]},
        {"fromImage": "", "steps": []},
        {"fromImage": "ubuntu:22.04", "fromTemplate": "x"},
        {"steps": [{"type": "COPY", "args": ["a", "/b"]}]},
    ]
    for body in bad:
        answer = await build(wire, "never", **body)
        assert answer["status"] == 400, answer
    assert (await wire.call("GET", "/templates/aliases/never"))[0] == 404
    for method, path in (("PATCH", "/templates/x"), ("POST", "/templates"), ("GET", "/templates/x/builds/y/other")):
        status, body, _ = await wire.call(method, path)
        assert (status, body["error_code"]) == (501, "unsupported"), path
