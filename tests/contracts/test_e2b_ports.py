"""Ports inside sandboxes, reached through the server over HTTP and WebSocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from headrace.sandboxes.errors import SpecRefused
from headrace.sandboxes.local.provider import LocalProvider
from headrace.serve.sandbox_servers.e2b.server import E2bServer, ServerSettings
from headrace.serve.sandbox_servers.e2b_state.live_sandbox import MAX_PORT_REQUESTS

pytestmark = pytest.mark.namespaces

PORT = 8077
# Answers with what it got; /cut promises more than it sends.
WEB = """
import http.server, json, socket, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/cut":
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.wfile.write(b"half")
            self.close_connection = True
            return
        seen = {"method": self.command, "path": self.path, "headers": dict(self.headers)}
        data = json.dumps({**seen, "body": body.decode("latin-1")}).encode()
        self.send_response(201 if self.command == "POST" else 200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Set-Cookie", "a=b")
        self.end_headers()
        self.wfile.write(data)
    do_POST = do_PUT = do_GET
class Server(http.server.ThreadingHTTPServer):
    address_family = socket.AF_INET6 if sys.argv[1] == "::1" else socket.AF_INET
    request_queue_size = 128
Server((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""
# The handshake of RFC 6455 and an echo of single frames.
SOCKET = """
import base64, hashlib, socketserver, sys
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        head = b""
        while not head.endswith(b"\\r\\n\\r\\n"):
            line = self.rfile.readline()
            if not line:
                return
            head += line
        lines = dict(line.split(": ", 1) for line in head.decode().splitlines()[1:] if ": " in line)
        if "Sec-WebSocket-Key" not in lines:
            self.wfile.write(b"HTTP/1.1 403 no\\r\\nContent-Length: 0\\r\\n\\r\\n")
            return
        key = lines["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        chosen = lines.get("Sec-WebSocket-Protocol", "").split(",")[0].strip()
        answer = "HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
        answer += f"Sec-WebSocket-Accept: {accept}\\r\\n"
        answer += f"Sec-WebSocket-Protocol: {chosen}\\r\\n" if chosen else ""
        self.wfile.write(answer.encode() + b"\\r\\n")
        while True:
            first, second = self.rfile.read(1)[0], self.rfile.read(1)[0]
            size = second & 127
            if size == 126:
                size = int.from_bytes(self.rfile.read(2), "big")
            mask, data = self.rfile.read(4), self.rfile.read(size)
            plain = bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
            length = bytes([size]) if size < 126 else b"\\x7e" + size.to_bytes(2, "big")
            self.wfile.write(bytes([first]) + length + plain)
            if first & 15 == 8:
                return
socketserver.TCPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# Requests for /slow wait for one for /go.
GATE = """
import asyncio, sys
async def main():
    gate = asyncio.Event()
    async def answer(reader, writer):
        head = await reader.readuntil(b"\\r\\n\\r\\n")
        if b" /slow " in head:
            await gate.wait()
        if b" /go " in head:
            gate.set()
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 0\\r\\n\\r\\n")
        await writer.drain()
    async with await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[1])) as server:
        await server.serve_forever()
asyncio.run(main())
"""
READY = "until (exec 3<> /dev/tcp/{host}/{port}) 2> /dev/null; do :; done"


@pytest.fixture
async def server() -> AsyncIterator[E2bServer]:
    async with LocalProvider() as local, E2bServer(local, ServerSettings()) as server:
        yield server


@pytest.fixture
async def box(server: E2bServer, wire: Callable[..., Any]) -> Any:
    return await wire(server.url).create()


async def serve(box: Any, program: str, port: int = PORT, address: str = "127.0.0.1") -> None:
    """Start a server in the sandbox, and wait until it accepts connections."""
    await box.files("POST", "/tmp/server.py", program.encode())
    arguments = f"{address} {port}" if program is WEB else str(port)
    command = (
        f"python3 /tmp/server.py {arguments} < /dev/null > /dev/null 2>&1 & {READY.format(host=address, port=port)}"
    )
    assert (await box.run(command))[1]["exitCode"] == 0


async def get(box: Any, path: str = "/", *, port: object = PORT, method: str = "GET", **more: Any) -> tuple[int, Any]:
    headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": str(port)} | more.pop("headers", {})
    async with box.http.request(method, box.url + path, headers=headers, **more) as response:
        data = await response.read()
        return response.status, json.loads(data) if data[:1] == b"{" else data


def host_of(box: Any, port: int = PORT) -> str:
    """What `getHost` of the SDKs returns."""
    return f"{port}-{box.id}.{box.box['domain']}"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
async def test_a_server_in_the_sandbox_answers_by_headers_and_by_host(box: Any, address: str) -> None:
    await serve(box, WEB, address=address)
    status, seen = await get(box, "/a%2Fb?c=d&e", method="POST", data=b"\x00body")
    assert (status, seen["method"], seen["path"], seen["body"]) == (201, "POST", "/a%2Fb?c=d&e", "\x00body")
    assert not {"E2b-Sandbox-Id", "E2b-Sandbox-Port"} & set(seen["headers"])
    host = host_of(box)
    assert host == f"{PORT}-{box.id}.localhost:{box.url.rpartition(':')[2]}"
    async with box.http.get(box.url + "/x", headers={"Host": host}) as response:
        assert (response.status, response.headers["Set-Cookie"]) == (200, "a=b")
        assert (await response.json(content_type=None))["headers"]["Host"] == host


async def test_every_path_and_method_reaches_the_port(box: Any) -> None:
    await serve(box, WEB)
    for path in ("/sandboxes", "/health", "/files?path=x", "/process.Process/List", "/templates"):
        assert (await get(box, path, method="PUT"))[1]["path"] == path


async def test_an_answer_that_breaks_off_does_not_look_complete(box: Any) -> None:
    await serve(box, WEB)
    with pytest.raises(aiohttp.ClientPayloadError):
        await get(box, "/cut")


async def test_websockets_relay_messages_protocols_and_close_codes(box: Any) -> None:
    await serve(box, SOCKET)
    headers = {"E2b-Sandbox-Id": box.id, "E2b-Sandbox-Port": str(PORT)}
    async with box.http.ws_connect(f"{box.url}/ws", headers=headers, protocols=("jupyter", "x")) as socket:
        assert socket.protocol == "jupyter"
        await socket.send_str("tüxt")
        assert await socket.receive_str(timeout=30) == "tüxt"
        await socket.send_bytes(b"\x00" * 300)
        assert await socket.receive_bytes(timeout=30) == b"\x00" * 300
        await socket.close(code=4001, message=b"bye")
        assert socket.close_code == 4001
    status, _ = await get(box, "/ws")
    assert status == 403


async def test_without_a_listener_the_answer_is_502(box: Any) -> None:
    status, answer = await get(box, port=49999)
    assert (status, answer) == (502, {"code": 502, "message": "nothing listens on 49999 in this sandbox"})
    # The server's own listener for `sudo` is not among the sandbox's ports.
    assert (await get(box, port=49982))[0] == 502


@pytest.mark.parametrize("port", ["abc", "0", "65536", "-1", "8 0", "٣", "1" * 40])
async def test_a_port_that_is_no_port_is_refused(box: Any, port: str) -> None:
    status, answer = await get(box, port=port)
    assert (status, answer["code"]) == (400, 400)
    assert answer["message"].startswith("port ")


async def test_a_port_name_in_the_host_is_refused(box: Any) -> None:
    async with box.http.get(box.url, headers={"Host": f"web-{box.id}.localhost"}) as response:
        assert (response.status, (await response.json())["code"]) == (400, 400)


@pytest.mark.parametrize("body", [{"secure": True}, {"network": {"allowPublicTraffic": False}}])
async def test_a_secure_sandbox_requires_its_secret(server: E2bServer, wire: Callable[..., Any], body: Any) -> None:
    box, other = await wire(server.url).create(**body), await wire(server.url).create(**body)
    await serve(box, WEB)
    token = box.box["trafficAccessToken"]
    for wrong in ({}, {"E2b-Traffic-Access-Token": "x"}, {"E2b-Traffic-Access-Token": other.box["trafficAccessToken"]}):
        status, answer = await get(box, headers=wrong)
        assert (status, answer["code"]) == (403, 403)
    for right in ({"E2b-Traffic-Access-Token": token}, {"X-Access-Token": box.box["envdAccessToken"]}):
        status, seen = await get(box, headers={**right, "X-Other": "1"})
        assert (status, seen["headers"]["X-Other"]) == (200, "1")
        assert not set(right) & set(seen["headers"])
    # The secret of the ports opens nothing else.
    assert (
        await wire(server.url).call(
            "GET", "/files?path=/etc/passwd", **{"E2b-Sandbox-Id": box.id, "X-Access-Token": token}
        )
    )[0] == 401


async def test_ports_of_dead_paused_and_unknown_sandboxes_are_502(box: Any) -> None:
    await serve(box, WEB)
    await box.call("POST", f"/sandboxes/{box.id}/pause", {})
    status, answer = await get(box)
    assert (status, "was not found" in answer["message"]) == (502, True)
    await box.call("POST", f"/sandboxes/{box.id}/resume", {})
    assert (await get(box))[0] == 200
    await box.call("DELETE", f"/sandboxes/{box.id}")
    assert (await get(box))[0] == 502


async def test_requests_to_the_ports_of_one_sandbox_are_bounded(box: Any) -> None:
    await serve(box, GATE)
    waiting = {asyncio.ensure_future(get(box, "/slow")) for _ in range(MAX_PORT_REQUESTS + 3)}
    refused: set[asyncio.Future[Any]] = set()
    async with asyncio.timeout(60):
        while len(refused) < 3:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            refused |= done
    for status, answer in [one.result() for one in refused]:
        assert (status, answer["message"].startswith(f"{MAX_PORT_REQUESTS} requests")) == (429, True)
    assert (await get(box))[0] == 429
    # A client that leaves makes room for the one that ends the waiting.
    waiting.pop().cancel()
    async with asyncio.timeout(60):
        while (await get(box, "/go"))[0] != 200:
            pass
    assert {status for status, _ in await asyncio.gather(*waiting)} == {200}


async def test_a_sandbox_reaches_neither_the_host_nor_another_sandbox(server: E2bServer, box: Any, wire: Any) -> None:
    other = await wire(server.url).create()
    await serve(other, WEB)
    assert (await get(box))[0] == 502
    assert (await get(other))[0] == 200
    own_port = int(server.url.rpartition(":")[2])
    assert (await get(box, port=own_port))[0] == 502


async def test_a_domain_that_does_not_resolve_is_refused() -> None:
    async with LocalProvider() as local:
        with pytest.raises(SpecRefused, match=r"--domain no-such\.invalid.*does not resolve.*wildcard"):
            async with E2bServer(local, ServerSettings(domain="no-such.invalid")):
                pass
