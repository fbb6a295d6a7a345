"""Service of the host inside a sandbox: one URL prefix, streams in both directions, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from headrace.sandboxes import doctor
from headrace.sandboxes.base import HostPort, Sandbox, SandboxSpec
from headrace.sandboxes.errors import NamespacesUnavailable, SandboxGone, SpecRefused
from headrace.sandboxes.local.exposed import MAX_CONNECTIONS, is_below
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

PREFIX = "/s/session-1"
PORT = 8080
FETCH = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", 8080, timeout=20)
for path in sys.argv[1:]:
    connection.request("GET", path)
    answer = connection.getresponse()
    print(answer.status, answer.read().decode().strip())
"""


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/s/one", True),
        ("/s/one/", True),
        ("/s/one/v1/messages?beta=true", True),
        ("/s/one?x=/../", True),
        ("/s/one/caf%C3%A9%20x", True),
        ("/s/on", False),
        ("/s/one2", False),
        ("/s/one/../two", False),
        ("/s/one/%2e%2e/two", False),
        ("/s/one/%2E%2E%2Ftwo", False),
        ("/s/one/.%2e/two", False),
        ("/s/one/x%2Fy", False),
        ("/s/one/..\\two", False),
        ("/s/one/%5c..%5ctwo", False),
        ("/s/one/.", False),
        ("/s/one/..;/two", False),
        ("/s/one/%2e.;x=1/two", False),
        ("//s/one", False),
        ("/s//one", False),
        ("/S/one", False),
        ("/%73/one", False),
        ("http://elsewhere/s/one", False),
        ("*", False),
        ("", False),
    ],
)
def test_is_below_accepts_only_literal_paths_below_the_prefix(path: str, *, allowed: bool) -> None:
    assert is_below(path, "/s/one") is allowed


class Service:
    """Service of the host that records the requests it gets."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.streaming = asyncio.Event()
        self.gone = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.paths.append(request.raw_path)
        if request.path.endswith("/stream"):
            return await self._stream(request)
        body = await request.content.read()
        headers = {"X-Seen": request.headers.get("X-Asked", "")}
        return web.Response(text=f"{request.method} {len(body)} {request.host}", headers=headers)

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            await response.write(b"first\n")
            self.streaming.set()
            await asyncio.Event().wait()
        finally:
            self.gone.set()
        return response


@pytest.fixture
async def service() -> AsyncIterator[tuple[Service, HostPort]]:
    service = Service()
    server = web.Server(service.handle, handler_cancellation=True)
    listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    yield service, HostPort(host="127.0.0.1", port=port)
    listener.close()
    await server.shutdown(0)


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    try:
        await asyncio.to_thread(doctor.require_namespaces)
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    # One client holds more connections than the default limit of a small host.
    async with LocalProvider(LocalSandboxConfig(open_files=1024)) as provider:
        yield await provider.attach(await provider.create(SandboxSpec()))


async def fetch(sandbox: Sandbox, *paths: str) -> list[str]:
    arguments = " ".join(f"'{path}'" for path in paths)
    result = await sandbox.exec(f"python3 - {arguments}", stdin=FETCH.encode(), user="agent", timeout_s=30)
    assert result.exit_code == 0, result
    return result.stdout.decode().splitlines()


@pytest.mark.namespaces
async def test_only_the_prefix_is_reachable_even_on_a_reused_connection(
    sandbox: Sandbox, service: tuple[Service, HostPort]
) -> None:
    seen, target = service
    async with sandbox.expose(PORT, target, PREFIX):
        answers = await fetch(sandbox, f"{PREFIX}/v1", "/s/session-2/v1", f"{PREFIX}/../session-2", PREFIX, "/admin")
    assert [answer.split()[0] for answer in answers] == ["200", "403", "403", "200", "403"]
    assert seen.paths == [f"{PREFIX}/v1", PREFIX]
    assert f"{target.host}:{target.port}" in answers[0]


@pytest.mark.namespaces
async def test_the_services_own_port_and_the_internet_are_unreachable(
    sandbox: Sandbox, service: tuple[Service, HostPort]
) -> None:
    _, target = service
    connect = "exec 3<>/dev/tcp/{}/{}"
    async with sandbox.expose(PORT, target, PREFIX):
        assert (await sandbox.exec(connect.format("127.0.0.1", PORT), timeout_s=30)).exit_code == 0
        for host, port in (("127.0.0.1", target.port), ("8.8.8.8", 53), ("169.254.169.254", 80), ("10.0.0.1", PORT)):
            assert (await sandbox.exec(connect.format(host, port), timeout_s=30)).exit_code != 0
    assert (await sandbox.exec(connect.format("127.0.0.1", PORT), timeout_s=30)).exit_code != 0


@pytest.mark.namespaces
async def test_bodies_and_headers_are_forwarded(sandbox: Sandbox, service: tuple[Service, HostPort]) -> None:
    _, target = service
    script = (
        "import urllib.request as u\n"
        f"r = u.Request('http://127.0.0.1:{PORT}{PREFIX}', data=bytes(3_000_000), headers={{'X-Asked': 'yes'}})\n"
        "with u.urlopen(r) as a: print(a.read().decode(), a.headers['X-Seen'])"
    )
    async with sandbox.expose(PORT, target, PREFIX):
        result = await sandbox.exec("python3 -", stdin=script.encode(), timeout_s=30)
    assert result.stdout.decode().split()[:2] == ["POST", "3000000"], result
    assert result.stdout.decode().split()[-1] == "yes"


@pytest.mark.namespaces
async def test_a_request_is_cancelled_when_its_client_disconnects(
    sandbox: Sandbox, service: tuple[Service, HostPort]
) -> None:
    seen, target = service
    script = (
        "import http.client\n"
        f"c = http.client.HTTPConnection('127.0.0.1', {PORT}); c.request('GET', '{PREFIX}/stream')\n"
        "print(c.getresponse().readline().decode(), flush=True)"
    )
    async with sandbox.expose(PORT, target, PREFIX):
        result = await sandbox.exec("python3 -", stdin=script.encode(), timeout_s=30)
        assert result.stdout == b"first\n\n"
        await seen.gone.wait()


@pytest.mark.namespaces
async def test_the_number_of_connections_is_limited(sandbox: Sandbox, service: tuple[Service, HostPort]) -> None:
    _, target = service
    script = (
        "import socket\nheld, refused = [], 0\n"
        f"for _ in range({MAX_CONNECTIONS * 2}):\n"
        f"    s = socket.create_connection(('127.0.0.1', {PORT})); held.append(s)\n"
        f"    s.sendall(b'GET {PREFIX} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n')\n"
        "    try: refused += not s.recv(1)\n"
        "    except ConnectionError: refused += 1\n"
        "print(refused)"
    )
    async with sandbox.expose(PORT, target, PREFIX):
        result = await sandbox.exec("python3 -", stdin=script.encode(), timeout_s=60)
        assert result.stdout.decode().strip() == str(MAX_CONNECTIONS), result
        # The connections belonged to the client: they are free again once it has ended.
        assert (await fetch(sandbox, PREFIX))[0].startswith("200")


@pytest.mark.namespaces
async def test_an_unreachable_service_gives_502(sandbox: Sandbox, unused_tcp_port: int) -> None:
    async with sandbox.expose(PORT, HostPort(host="127.0.0.1", port=unused_tcp_port), PREFIX):
        assert (await fetch(sandbox, PREFIX))[0].startswith("502")


@pytest.mark.namespaces
async def test_a_port_in_use_and_an_invalid_prefix_are_refused(
    sandbox: Sandbox, service: tuple[Service, HostPort]
) -> None:
    _, target = service
    async with sandbox.expose(PORT, target, PREFIX):
        for port, prefix in ((PORT, PREFIX), (70_000, PREFIX), (-1, PREFIX), (PORT + 1, "s"), (PORT + 1, "/a/../b")):
            with pytest.raises(SpecRefused):
                async with sandbox.expose(port, target, prefix):
                    pass
    async with sandbox.expose(PORT, target, PREFIX):
        pass
    await sandbox.kill()
    with pytest.raises(SandboxGone):
        async with sandbox.expose(PORT, target, PREFIX):
            pass


PIPELINE = f"""
import socket, time
client = socket.create_connection(("127.0.0.1", {PORT}))
client.sendall(b"GET {PREFIX}/stream HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n" * 2000)
print(client.recv(1), flush=True)
time.sleep(1000)
"""


@pytest.mark.namespaces
async def test_open_requests_do_not_delay_the_exit_of_the_context(
    sandbox: Sandbox, service: tuple[Service, HostPort]
) -> None:
    seen, target = service
    async with asyncio.timeout(30):
        async with sandbox.expose(PORT, target, PREFIX):
            asking = await sandbox.spawn(["python3", "-c", PIPELINE], user="agent")
            assert await anext(asking.output())
            assert not seen.gone.is_set()
        await seen.gone.wait()
    assert seen.gone.is_set()


@pytest.mark.namespaces
async def test_exceptions_inside_the_context_are_not_wrapped(
    sandbox: Sandbox, service: tuple[Service, HostPort]
) -> None:
    _, target = service
    with pytest.raises(SandboxGone):
        async with sandbox.expose(PORT, target, PREFIX):
            await sandbox.kill()
            await sandbox.exec("true", timeout_s=30)


@pytest.mark.namespaces
async def test_compressed_bodies_stay_compressed_and_garbage_is_not_logged(
    sandbox: Sandbox, service: tuple[Service, HostPort], caplog: pytest.LogCaptureFixture
) -> None:
    _, target = service
    script = (
        "import gzip, socket, urllib.request as u\n"
        f"address = ('127.0.0.1', {PORT})\n"
        "body = gzip.compress(bytes(3_000_000))\n"
        f"r = u.Request('http://127.0.0.1:{PORT}{PREFIX}', data=body, headers={{'Content-Encoding': 'gzip'}})\n"
        "with u.urlopen(r) as a: print(len(body), a.read().decode())\n"
        "with socket.create_connection(address) as s:\n"
        "    s.sendall(b'no request\\r\\n\\r\\n')\n"
        "    print(s.recv(12))"
    )
    async with sandbox.expose(PORT, target, PREFIX):
        result = await sandbox.exec("python3 -", stdin=script.encode(), timeout_s=30)
    sent, _, received, *_, refused = result.stdout.decode().split()
    assert int(sent) < int(received) == 3_000_000
    assert refused == "400'"
    assert caplog.records == []
