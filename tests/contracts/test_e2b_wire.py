"""Invalid input, other owners' keys and full servers over plain HTTP: E2B's codes, no retries, no sandboxes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.buffer.primitives.durable_files import write_private
from headrace.sandboxes.errors import SecretRefused, SpecRefused
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig
from headrace.serve.sandbox_servers.e2b.server import E2bServer, ServerSettings
from headrace.serve.sandbox_servers.e2b_state.images import ImageMap
from headrace.serve.sandbox_servers.e2b_state.keys import load_keys
from headrace.serve.sandbox_servers.e2b_state.limits import SandboxLimits

pytestmark = pytest.mark.namespaces
ALICE, BOB, CAROL, DAVE = "alice-secret", "bob-secret", "carol-secret", "dave-secret"
CEILINGS = "memory=96M,disk=8M,processes=40,lifetime=100"
START = "process.Process/Start"


@pytest.fixture
async def local() -> AsyncIterator[LocalProvider]:
    async with LocalProvider(LocalSandboxConfig(max_sandboxes=6)) as local:
        yield local


@pytest.fixture
async def server(tmp_path: Path, local: LocalProvider) -> AsyncIterator[E2bServer]:
    keys = tmp_path / "keys"
    digest = "6ff1b1e1d8a9b2e2d7de2aa7c0ec5d9a2f2cf2b8a4ec1d9be3a25a2b1f3b9ac0"
    write_private(keys, f"# keys\nalice:{ALICE}\nbob:{BOB}:2\ncarol:{digest}\ndave:{DAVE}::{CEILINGS}\n".encode())
    limits = SandboxLimits(memory_bytes=2 << 30, disk_bytes=256 << 20)
    images = ImageMap({"task": "host", "lost": "no-such"}, "acme")
    settings = ServerSettings(keys=load_keys(keys), images=images, limits=limits)
    async with E2bServer(local, settings) as server:
        yield server


@pytest.fixture
def alice(server: E2bServer, wire: Callable[..., Any]) -> Any:
    return wire(server.url, ALICE)


@pytest.fixture
async def box(alice: Any) -> Any:
    return await alice.create()


@pytest.mark.parametrize(
    "body",
    [
        b"not json",
        b"[]",
        {},
        {"templateID": 7},
        {"templateID": "unknown-image"},
        {"templateID": "lost"},
        {"templateID": "../../etc"},
        {"templateID": "/"},
        {"templateID": "base", "timeout": -1},
        {"templateID": "base", "timeout": "60"},
        {"templateID": "base", "timeout": 10**9},
        {"templateID": "base", "metadata": ["a"]},
        {"templateID": "base", "metadata": {"a": 1}},
        {"templateID": "base", "envVars": {"A": None}},
        {"templateID": "base", "envVars": {"A": "\0"}},
        {"templateID": "base", "envVars": {"A=B": "1"}},
        {"templateID": "base", "autoPause": "yes"},
        {"templateID": "base", "metadata": {"acme/image": "unknown-image"}},
    ],
)
async def test_an_invalid_create_returns_400_and_creates_no_sandbox(
    alice: Any, local: LocalProvider, body: Any
) -> None:
    for path in ("/sandboxes", "/v2/sandboxes"):
        status, answer, _ = await alice.call("POST", path, body)
        assert (status, answer["code"]) == (400, 400), answer
        assert answer["message"]
    assert await local.list() == []


async def test_images_are_named_by_template_or_metadata(alice: Any) -> None:
    assert (await alice.create(templateID="task")).box["templateID"] == "task"
    named = await alice.create(metadata={"acme/image": "task", "acme/size": "md"})
    _, detail, _ = await alice.call("GET", f"/sandboxes/{named.id}")
    assert (detail["templateID"], detail["metadata"]) == ("base", {"acme/image": "task", "acme/size": "md"})
    await alice.create(metadata={"acme": "task"})


async def test_every_route_requires_a_key(server: E2bServer, box: Any, wire: Callable[..., Any]) -> None:
    routes = [
        ("POST", "/sandboxes"),
        ("POST", "/v2/sandboxes"),
        ("GET", "/v2/sandboxes"),
        ("GET", f"/sandboxes/{box.id}"),
        ("DELETE", f"/sandboxes/{box.id}"),
        ("GET", "/templates"),
        ("GET", "/snapshots"),
    ]
    for key in ("", "wrong", ALICE[:-1], f"{ALICE}x"):
        for method, path in routes:
            status, answer, _ = await wire(server.url, key).call(method, path)
            assert (status, answer["code"]) == (401, 401), (method, path)


async def test_a_key_can_use_only_its_own_sandboxes(server: E2bServer, box: Any, wire: Callable[..., Any]) -> None:
    bob = wire(server.url, BOB)
    one = f"/sandboxes/{box.id}"
    assert (await bob.call("GET", "/v2/sandboxes"))[1] == []
    assert (await bob.call("GET", "/sandboxes"))[1] == []
    for method, path, body in [
        ("GET", one, None),
        ("DELETE", one, None),
        ("POST", f"{one}/timeout", {"timeout": 1}),
        ("POST", f"{one}/connect", {"timeout": 1}),
        ("POST", f"/v2{one}/connect", {}),
        ("POST", f"{one}/pause", {}),
        ("POST", f"{one}/snapshots", {}),
        ("GET", f"{one}/metrics", None),
        ("GET", f"{one}/logs", None),
    ]:
        status, answer, _ = await bob.call(method, path, body)
        assert (status, answer["code"]) == (404, 404), (method, path)
    own = await bob.create()
    box.box["envdAccessToken"] = own.box["envdAccessToken"]
    assert (await box.rpc("process.Process/List", {}))[0] == 401


async def test_envd_accepts_only_the_token_of_its_sandbox(box: Any) -> None:
    token = box.box["envdAccessToken"]
    for wrong in ("", "x", token[:-1], token + "0", "ä"):
        box.box["envdAccessToken"] = wrong
        for reply in (await box.rpc("process.Process/List", {}), await box.rpc("filesystem.Filesystem/Stat", {})):
            assert (reply[0], reply[1]["code"]) == (401, 401)
        assert (await box.files("GET", "/etc/passwd"))[0] == 401
        with pytest.raises(AssertionError, match="unauthorized"):
            await box.run("true")


async def test_an_exceeded_quota_returns_429_with_a_retry_delay(server: E2bServer, wire: Callable[..., Any]) -> None:
    bob = wire(server.url, BOB)
    first = await bob.create()
    await bob.create()
    status, answer, headers = await bob.call("POST", "/v2/sandboxes", {"templateID": "base"})
    assert (status, answer["code"], int(headers["Retry-After"]) >= 1) == (429, 429, True)
    assert (await bob.call("DELETE", f"/sandboxes/{first.id}"))[0] == 204
    await bob.create()


async def test_dead_sandboxes_do_not_count_towards_the_quota(
    server: E2bServer, local: LocalProvider, wire: Callable[..., Any]
) -> None:
    bob = wire(server.url, BOB)
    for _ in range(2):
        await bob.create()
    for info in await local.list():
        await local.destroy(info.id)
    await bob.create()


async def test_a_full_provider_returns_429_with_a_retry_delay(alice: Any) -> None:
    for _ in range(6):
        await alice.create()
    status, answer, headers = await alice.call("POST", "/v2/sandboxes", {"templateID": "base"})
    assert (status, answer["code"], int(headers["Retry-After"]) >= 1) == (429, 429, True)


async def test_timeouts_must_be_non_negative_integers(alice: Any, box: Any) -> None:
    one = f"/sandboxes/{box.id}"
    for body in ({}, {"timeout": -1}, {"timeout": 1.5}, {"timeout": "9"}, {"timeout": None}, b"x"):
        assert (await alice.call("POST", f"{one}/timeout", body))[0] == 400, body
    assert (await alice.call("POST", f"{one}/timeout", {"timeout": 60}))[0] == 204
    assert (await alice.call("POST", f"{one}/refreshes", {"duration": 90}))[0] == 204
    assert (await alice.call("POST", f"{one}/refreshes", {"duration": -90}))[0] == 400
    assert (await alice.call("POST", f"{one}/resume", {}))[0] == 409


async def test_missing_sandboxes_return_404_and_unsupported_routes_501(alice: Any, box: Any) -> None:
    for method, path in (("GET", "/sandboxes/i0"), ("DELETE", "/sandboxes/i0"), ("GET", "/no/such"), ("PATCH", "/x")):
        assert (await alice.call(method, path))[1]["code"] == 404
    assert (await alice.call("PUT", "/sandboxes"))[1]["code"] == 405
    refused = [
        ("POST", "/v3/templates"),
        ("GET", "/templates"),
        ("GET", "/templates/x/builds/y/status"),
        ("POST", f"/sandboxes/{box.id}/fork"),
        ("GET", "/volumes"),
    ]
    for method, path in refused:
        status, answer, _ = await alice.call(method, path, {} if method == "POST" else None)
        assert (status, answer["code"], answer["error_code"]) == (501, 501, "unsupported"), path
    assert (await alice.call("POST", "/v2/sandboxes", {"templateID": "base", "mcp": {"a": {}}}))[0] == 501


@pytest.mark.parametrize("route", ["create", "update"])
async def test_a_way_out_is_refused_by_name_or_told_to_be_missing(
    alice: Any, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    box = await alice.create()

    async def ask(**wanted: Any) -> tuple[int, Any, Any]:
        if route == "update":
            return await alice.call("PUT", f"/sandboxes/{box.id}/network", wanted)
        internet = wanted.pop("allow_internet_access", None)
        body = {"templateID": "base", "network": wanted or None, "allow_internet_access": internet}
        return await alice.call("POST", "/v2/sandboxes", body)

    for wanted in ({"denyOut": ["0.0.0.0/0"]}, {"allow_internet_access": False}, {}):
        status, _, headers = await ask(**wanted)
        assert (status, headers.get("headrace-not-granted")) == (201 if route == "create" else 204, None)
    named: list[dict[str, Any]] = [
        {"allowOut": ["1.1.1.1"]},
        {"rules": {"a.example": [{}]}},
        {"egressProxy": {"address": "a:1"}},
    ]
    for wanted in named:
        status, answer, _ = await ask(**wanted)
        assert (status, answer["error_code"]) == (501, "unsupported")
        assert next(iter(wanted)) in answer["message"]
    assert not caplog.messages
    status, _, headers = await ask(allow_internet_access=True)
    assert (status, headers["headrace-not-granted"]) == (201 if route == "create" else 204, "allow_internet_access")
    assert [line for line in caplog.messages if line.endswith("allow_internet_access: a sandbox reaches no network")]


async def test_lists_are_filtered_and_paged(alice: Any) -> None:
    boxes = [await alice.create(metadata={"n": str(number), "odd &=": "ü"}) for number in range(3)]
    rows = []
    token = ""
    while True:
        query = "?limit=2&metadata=odd%252520%252526%25253D%253D%2525C3%2525BC".replace("%25", "%")
        status, page, headers = await alice.call("GET", f"/v2/sandboxes{query}&nextToken={token}")
        assert status == 200, page
        rows += [row["sandboxID"] for row in page]
        if not (token := headers.get("x-next-token", "")):
            break
    assert rows == [box.id for box in reversed(boxes)]
    for query in ("limit=0", "limit=x", "limit=1000", "state=dead", "nextToken=%25", "order=up", "startedAfter=noon"):
        assert (await alice.call("GET", f"/v2/sandboxes?{query}"))[0] == 400, query
    assert (await alice.call("GET", "/v2/sandboxes?state=paused"))[1] == []
    assert len((await alice.call("GET", "/v2/sandboxes?order=asc&startedAfter=2001-01-01T00:00:00Z"))[1]) == 3
    assert len((await alice.call("GET", "/sandboxes?metadata=n%3D1"))[1]) == 1


async def test_idempotency_keys_are_validated_and_bound_to_one_request(alice: Any) -> None:
    body = {"templateID": "base", "metadata": {"a": "1"}}
    for wrong in ("UPPER", "a b", "x" * 256):
        assert (await alice.call("POST", "/v2/sandboxes", body, **{"Idempotency-Key": wrong}))[0] == 400
    replies = await asyncio.gather(
        *(alice.call("POST", "/v2/sandboxes", body, **{"Idempotency-Key": "one-key"}) for _ in range(5))
    )
    assert {reply[0] for reply in replies} == {201}
    assert len({reply[1]["sandboxID"] for reply in replies}) == 1
    other = {"templateID": "base", "metadata": {"a": "2"}}
    status, answer, _ = await alice.call("POST", "/v2/sandboxes", other, **{"Idempotency-Key": "one-key"})
    assert (status, answer["error_code"]) == (422, "idempotency_request_mismatch")
    assert len((await alice.call("GET", "/v2/sandboxes"))[1]) == 1


@pytest.mark.whole(but_first=True)
@pytest.mark.parametrize(
    ("method", "message", "status", "code"),
    [
        ("filesystem.Filesystem/Stat", b"{", 400, "invalid_argument"),
        ("filesystem.Filesystem/Stat", b"[]", 400, "invalid_argument"),
        ("filesystem.Filesystem/Stat", {"path": 5}, 400, "invalid_argument"),
        ("filesystem.Filesystem/Stat", {"path": "/tmp/\0"}, 400, "invalid_argument"),
        ("filesystem.Filesystem/Stat", {"path": "/" + "a" * 5000}, 400, "invalid_argument"),
        ("filesystem.Filesystem/Stat", {"path": "/" + "a" * 300}, 404, "not_found"),
        ("filesystem.Filesystem/Stat", {"path": "~agent/x"}, 400, "invalid_argument"),
        ("filesystem.Filesystem/Stat", {"path": "/no/such"}, 404, "not_found"),
        ("filesystem.Filesystem/Stat", {"path": "../../no/such"}, 404, "not_found"),
        ("filesystem.Filesystem/ListDir", {"path": "/", "depth": -1}, 400, "invalid_argument"),
        ("filesystem.Filesystem/ListDir", {"path": "/etc/passwd"}, 400, "invalid_argument"),
        ("filesystem.Filesystem/MakeDir", {"path": "/tmp"}, 409, "already_exists"),
        ("filesystem.Filesystem/MakeDir", {"path": "/proc/x"}, 404, "not_found"),
        ("filesystem.Filesystem/Move", {"source": "/no", "destination": "/tmp/x"}, 404, "not_found"),
        ("filesystem.Filesystem/GetWatcherEvents", {"watcherId": "w"}, 404, "not_found"),
        ("filesystem.Filesystem/RemoveWatcher", {}, 404, "not_found"),
        ("process.Process/SendSignal", {"process": {"pid": 99999}, "signal": "SIGNAL_SIGKILL"}, 404, "not_found"),
        ("process.Process/SendSignal", {"process": {}, "signal": 9}, 400, "invalid_argument"),
        ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": "SIGNAL_SIGHUP"}, 501, "unimplemented"),
        ("process.Process/SendSignal", {"process": {"pid": 1}, "signal": []}, 400, "invalid_argument"),
        ("filesystem.Filesystem/GetWatcherEvents", {"watcherId": []}, 400, "invalid_argument"),
        ("filesystem.Filesystem/RemoveWatcher", {"watcherId": {}}, 400, "invalid_argument"),
        ("process.Process/SendInput", {"process": {"tag": "none"}, "input": {"stdin": ""}}, 404, "not_found"),
        ("process.Process/CloseStdin", {"process": 3}, 400, "invalid_argument"),
        ("process.Process/Update", {"process": {"pid": 2**40}}, 404, "not_found"),
    ],
)
async def test_invalid_calls_return_connect_error_codes(
    box: Any, method: str, message: Any, status: int, code: str
) -> None:
    reply = await box.rpc(method, message)
    assert (reply[0], reply[1]["code"]) == (status, code), reply[1]


async def test_dots_in_paths_are_resolved_inside_the_sandbox(box: Any) -> None:
    _, answer, _ = await box.rpc("filesystem.Filesystem/Stat", {"path": "/tmp/../../../etc/passwd"})
    assert answer["entry"]["type"] == "FILE_TYPE_FILE"
    assert (await box.files("POST", "../../tmp/up", b"x"))[0] == 200
    assert (await box.files("GET", "/tmp/up"))[1] == b"x"


async def test_files_may_have_any_modification_time(box: Any) -> None:
    await box.run("mkdir /tmp/times; touch -d @99999999999999 /tmp/times/a; touch -d @-99999999999999 /tmp/times/b")
    _, answer, _ = await box.rpc("filesystem.Filesystem/ListDir", {"path": "/tmp/times"})
    times = [entry["modifiedTime"] for entry in answer["entries"]]
    assert times == ["9999-12-31T23:59:59.000000Z", "0001-01-01T00:00:00.000000Z"]


async def test_an_invalid_start_ends_its_stream_with_an_error(box: Any) -> None:
    process = {"cmd": "/bin/bash", "args": ["-c", "true"]}
    for message, code in [
        ({}, "invalid_argument"),
        ({"process": {"cmd": ""}}, "invalid_argument"),
        ({"process": {**process, "args": "x"}}, "invalid_argument"),
        ({"process": {**process, "args": [1]}}, "invalid_argument"),
        ({"process": {**process, "args": 5}}, "invalid_argument"),
        ({"process": {**process, "envs": {"A": 1}}}, "invalid_argument"),
        ({"process": {**process, "envs": {"": "1"}}}, "invalid_argument"),
        ({"process": {**process, "args": ["\0"]}}, "invalid_argument"),
        ({"process": {**process, "cwd": "/no/such"}}, "invalid_argument"),
        ({"process": process, "pty": {"size": {"rows": 0, "cols": 5}}}, "invalid_argument"),
        (b"", "invalid_argument"),
        (b"\x00\x00\x00", "invalid_argument"),
        (b"\x00\x00\x00\x00\xff{}", "invalid_argument"),
        (b"\x01\x00\x00\x00\x02{}", "unimplemented"),
        (b"\x00\xff\xff\xff\xff", "resource_exhausted"),
    ]:
        async with box.stream(START, message) as frames:
            assert [item async for item in frames][-1]["end"]["error"]["code"] == code, message
    for deadline in ("x", "-5", "9" * 11):
        headers = box.headers("application/connect+json", **{"Connect-Timeout-Ms": deadline})
        async with box.http.post(f"{box.url}/{START}", data=b"", headers=headers) as response:
            assert response.status == 400
    async with box.http.post(f"{box.url}/{START}", data=b"", headers=box.headers("application/proto")) as response:
        assert response.status == 415
    assert (await box.rpc("process.Process/List", {}))[1] == {"processes": []}


async def test_users_are_selected_as_envd_selects_them(box: Any) -> None:
    other = base64.b64encode(b"nobody:").decode()
    assert (await box.run("id -un", Authorization=f"Basic {other}"))[0] == b"nobody\n"
    assert (await box.run("id -un"))[0] == b"user\n"
    nobody = base64.b64encode(b"nobody-such:").decode()
    assert (await box.run("id -un", Authorization=f"Basic {nobody}"))[1]["error"]["code"] == "unauthenticated"
    reply = await box.rpc("filesystem.Filesystem/MakeDir", {"path": "/root/x"}, Authorization=f"Basic {other}")
    assert (reply[0], reply[1]["code"]) == (403, "permission_denied")
    reply = await box.rpc("filesystem.Filesystem/Stat", {"path": "/"}, Authorization="Basic ä")
    assert reply[0] == 401


async def test_idle_streams_send_keepalives(box: Any) -> None:
    start = {"process": {"cmd": "/bin/bash", "args": ["-c", "cat"]}}
    async with box.stream(START, start, **{"Keepalive-Ping-Interval": "1"}) as frames:
        assert "start" in (await anext(frames))["event"]
        assert "keepalive" in (await anext(frames))["event"]
    async with box.stream("filesystem.Filesystem/WatchDir", {"path": "/tmp"}, **{"Keepalive-Ping-Interval": "1"}) as it:
        assert "start" in await anext(it)
        assert "keepalive" in await anext(it)


async def test_deadlines_end_streams_and_commands(box: Any) -> None:
    out, end = await box.run("echo before; sleep 66", **{"Connect-Timeout-Ms": "5000"})
    assert (out, end["error"]["code"]) == (b"before\n", "deadline_exceeded")
    start = {"process": {"cmd": "/bin/bash", "args": ["-c", "sleep 67"]}, "stdin": False, "tag": "long"}
    async with box.stream(START, start) as frames:
        pid = (await anext(frames))["event"]["start"]["pid"]
        # A Connect's deadline ends the following, not the command.
        async with box.stream(
            "process.Process/Connect", {"process": {"tag": "long"}}, **{"Connect-Timeout-Ms": "200"}
        ) as followed:
            assert [item async for item in followed][-1]["end"]["error"]["code"] == "deadline_exceeded"
        while len(listed := (await box.rpc("process.Process/List", {}))[1]["processes"]) > 1:  # noqa: ASYNC110
            # The first command is told to be over before its processes are.
            await asyncio.sleep(0.02)
        [shown] = listed
        assert (shown["pid"], shown["tag"]) == (pid, "long")
        await box.rpc("process.Process/SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"})
        assert [item async for item in frames][-2]["event"]["end"]["status"] == "signal: terminated"


async def test_invalid_uploads_are_refused(box: Any) -> None:
    assert (await box.files("POST", "", b"x"))[0] == 400
    assert (await box.files("POST", "/tmp/x", b"x", content_type="text/plain"))[0] == 400
    assert (await box.files("POST", "/tmp", b"x"))[0] == 400
    assert (await box.files("POST", "/dev/null", b"x"))[0] == 400
    assert (await box.files("POST", "/usr/x", b"x"))[0] == 403
    assert (await box.files("POST", "/tmp/x", b"x", username="nobody-such"))[0] == 401
    assert (await box.files("GET", "/tmp"))[0] == 400
    assert (await box.files("GET", "/dev/zero"))[0] == 400
    assert (await box.files("GET", "/tmp/x"))[0] == 404


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("", b"x"),
        ("; boundary=a", b"junk"),
        ("; boundary=a", b"--a\r\nno header\r\n\r\nx\r\n--a--\r\n"),
        ("; boundary=a", b'--a\r\nContent-Disposition: form-data; name=file; filename="q"\r\n\r\nx'),
    ],
)
async def test_a_malformed_multipart_upload_returns_400(box: Any, kind: str, body: bytes) -> None:
    status, answer = await box.files("POST", "/tmp/q", body, content_type=f"multipart/form-data{kind}")
    assert (status, b"malformed" in answer) == (400, True), answer


async def test_a_fifo_created_by_an_agent_blocks_no_request(box: Any) -> None:
    await box.run("mkfifo /tmp/fifo; ln -s /tmp/fifo /tmp/link; ln -s /etc/passwd /tmp/passwd")
    for path in ("/tmp/fifo", "/tmp/link"):
        assert (await box.files("GET", path))[0] == 400
        assert (await box.files("POST", path, b"x"))[0] == 400
    assert b"root:" in (await box.files("GET", "/tmp/passwd"))[1]


async def test_a_failed_boot_raises_a_typed_error_and_leaves_nothing_behind(wire: Callable[..., Any]) -> None:
    async with LocalProvider(LocalSandboxConfig(boot_timeout_s=1e-6)) as local, E2bServer(local) as server:
        for headers in ({}, {"Idempotency-Key": "again"}):
            status, answer, given = await wire(server.url).call(
                "POST", "/v2/sandboxes", {"templateID": "base"}, **headers
            )
            assert (status, answer["error_code"], given["Should-Retry"]) == (504, "sandbox_create_failed", "true")
        assert await local.list() == []
        assert (await wire(server.url).call("GET", "/v2/sandboxes"))[1] == []


def test_key_files_are_validated_at_startup(tmp_path: Path) -> None:
    for text in ("", "alice", "alice:", ":key", "a:b:c", "a:b:1\na:c", "a:b\nc:b", "na me:key"):
        write_private(tmp_path / "keys", text.encode())
        with pytest.raises(SpecRefused):
            load_keys(tmp_path / "keys")
    with pytest.raises(SecretRefused, match="No such file"):
        load_keys(tmp_path / "missing")
    write_private(tmp_path / "keys", b"a:b")
    (tmp_path / "keys").chmod(0o644)
    with pytest.raises(SecretRefused, match=r"--keys .*: other users can read it \(mode 644\); chmod 600 "):
        load_keys(tmp_path / "keys")


async def test_without_keys_the_server_binds_to_loopback_only(local: LocalProvider, wire: Callable[..., Any]) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(SpecRefused):
            async with E2bServer(local, ServerSettings(host=host)):
                pass
    async with E2bServer(local, ServerSettings(host="localhost")) as server:
        assert (await wire(server.url, "").call("GET", "/v2/sandboxes"))[0] == 401
        assert (await wire(server.url, "anything").call("GET", "/v2/sandboxes"))[0] == 200
        with pytest.raises(SpecRefused, match="listen"):
            async with E2bServer(local, ServerSettings(port=int(server.url.rpartition(":")[2]))):
                pass


async def test_commands_know_their_sandbox_and_become_root_unless_forbidden(alice: Any, box: Any) -> None:
    said = (await box.run('cat /run/e2b/.E2B_SANDBOX_ID; echo " $E2B_SANDBOX_ID $E2B_SANDBOX $E2B_TEMPLATE_ID"'))[0]
    assert said.decode().split() == [box.id, box.id, "true", "base"]
    assert (await box.run("sudo id -u"))[0] == b"0\n"
    strict = await alice.create(metadata={"headrace_sudo": "no"})
    assert (await strict.run("sudo id -u 2>&1"))[0] == b"sudo: refused by the policy of this sandbox\n"


async def test_sandboxes_of_a_key_stay_below_its_ceilings(
    server: E2bServer, alice: Any, wire: Callable[..., Any]
) -> None:
    dave = wire(server.url, DAVE)
    status, answer, _ = await dave.call("POST", "/sandboxes", {"templateID": "base", "timeout": 101})
    assert (status, "at most 100 s" in answer["message"]) == (400, True)
    box = await dave.create(timeout=100)
    sizes = [(await client.call("GET", "/v2/sandboxes"))[1][0] for client in (dave, await alice.create())]
    assert [(size["memoryMB"], size["diskSizeMB"]) for size in sizes] == [(96, 8), (2048, 256)]
    assert all(size["cpuCount"] >= 1 for size in sizes)
    assert (await box.run("head -c 9M /dev/zero > /tmp/f"))[1]["exitCode"] != 0
    assert (await box.run("ulimit -u"))[0] == b"40\n"
    for path, body in (("timeout", {"timeout": 101}), ("connect", {"timeout": 101}), ("refreshes", {"duration": 101})):
        status, answer, _ = await box.call("POST", f"/sandboxes/{box.id}/{path}", body)
        assert (status, "at most 100 s" in answer["message"]) == (400, True), path
    assert (await box.call("POST", f"/sandboxes/{box.id}/connect", {}))[0] == 200


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_watchers_of_many_files_are_bounded_together(box: Any) -> None:
    names = "mkdir /tmp/many && cd /tmp/many && seq -f 'a-rather-long-name-of-a-file-%05g' 30000 | xargs touch"
    assert (await box.run(names))[1]["exitCode"] == 0
    replies = []
    for _ in range(10):
        replies.append(await box.rpc("filesystem.Filesystem/CreateWatcher", {"path": "/tmp/many"}))
        if replies[-1][0] != 200:
            break
    assert 2 <= len(replies) < 10
    status, answer, _ = replies[-1]
    assert (status, answer["code"]) == (429, "resource_exhausted")
    assert "watch less" in answer["message"]
    # One that ends makes room.
    first = replies[0][1]["watcherId"]
    assert (await box.rpc("filesystem.Filesystem/RemoveWatcher", {"watcherId": first}))[0] == 200
    async with asyncio.timeout(60):
        while (await box.rpc("filesystem.Filesystem/CreateWatcher", {"path": "/tmp/many"}))[0] != 200:
            pass
