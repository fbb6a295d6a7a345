"""Fuzzing of a running gateway: no request may cause a 5xx, end the gateway, or leak text into another session."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gzip
import http.client
import json
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.serve.gateway.capture.session import Budgets, SessionId
from support.chat_templates import QWEN3
from support.gateway_rig import (
    ADMIN,
    ANTHROPIC,
    CHAT,
    GUARD_S,
    RESPONSES,
    Client,
    Engine,
    Wire,
    World,
    address_of,
    call_text,
    world,
)
from support.scripted_engine import Ask, Sampled, segments
from support.spoiled_bodies import NASTY, WIRES, mutants
from support.wires import read_refusal

T = TypeVar("T")
CHECK_EVERY = 25
"""So many bodies a session gets, before the canaries sing and it is finished."""


# What is sent.

SPOILED: dict[str, list[dict[str, Any]]] = {
    wire.name: [
        {listed: []},
        {listed: None},
        {listed: [{"role": "wizard", "content": "x"}]},
        {listed: [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": "AAAA"}}]}]},
        {listed: [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
        {listed: [{"role": "user", "content": [{"type": "no_such_block", "x": [1]}]}]},
        {listed: "@many@"},
        {listed: [{"role": "user", "content": "@long@"}]},
        {"tool_choice": {"type": "tool", "name": "Bash"}},
        {"tool_choice": "required"},
        {"n": 2},
        {"stop": 5, "stop_sequences": [5]},
        {"stop": [""], "stop_sequences": [""]},
        {"stop": ["x"] * 99, "stop_sequences": ["x"] * 99},
        {wire.limit_field: -1},
        {wire.limit_field: 10**15},
        {wire.limit_field: 1.5},
        {"model": None, "tools": None, "system": None, "instructions": None},
        {"stream": "yes"},
    ]
    for wire, listed in ((ANTHROPIC, "messages"), (CHAT, "messages"), (RESPONSES, "input"))
}


INFLATED = {
    b'"@many@"': json.dumps([{"role": "user", "content": "x"}] * 3000).encode(),
    b"@long@": b"blah " * 100_000,
}
"""What stands for them in a body that somebody may have to read."""


class Sent(NamedTuple):
    """What is sent on which wire."""

    wire: Wire
    body: bytes
    headers: tuple[tuple[str, bytes], ...]
    framing: str


def _overruled(body: dict[str, Any], fields: dict[str, Any]) -> bytes:
    return json.dumps(body | fields).encode()


def _doubled(body: bytes) -> bytes:
    """With keys that stand there twice, the first time with another value."""
    return b'{"messages":null,"input":7,"model":[],"stream":{},' + body.lstrip()[1:]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[Wire, bytes]:
    number = draw(st.integers(0, 2))
    wire, body = (ANTHROPIC, CHAT, RESPONSES)[number], WIRES[number][1]
    kind = draw(st.sampled_from(["mutant", "mutant", "mutant", "overruled", "doubled", "cut", "binary", "whole"]))
    if kind == "overruled":
        return wire, _overruled(body, draw(st.sampled_from(SPOILED[wire.name])))
    if kind == "binary":
        return wire, draw(st.binary(max_size=60))
    if kind == "whole":
        return wire, json.dumps(draw(NASTY)).encode()
    mutant = draw(mutants(body))
    if kind == "cut":
        return wire, mutant[: draw(st.integers(0, len(mutant)))]
    return wire, _doubled(mutant) if kind == "doubled" else mutant


HEADERS = st.lists(
    st.sampled_from(
        [
            ("Content-Type", b"text/plain; charset=utf-16"),
            ("Content-Type", b"multipart/form-data; boundary="),
            ("Content-Type", b"\xff"),
            ("X-Claude-Code-Agent-Id", b"\xff\xfe"),
            ("X-Claude-Code-Agent-Id", b"a" * 5000),
            ("x-codex-turn-metadata", b'{"thread_id": {}}'),
            ("Authorization", b"Bearer \xff"),
            ("x-api-key", b"\xe9"),
            ("anthropic-beta", b"x" * 5000),
            ("traceparent", b"00-zz"),
            ("Expect", b"100-continue"),
            ("Content-Encoding", b"gzip"),
            ("Content-Encoding", b"deflate"),
        ]
    ),
    max_size=2,
    unique_by=lambda header: header[0],
).map(tuple)
FRAMINGS = st.sampled_from(
    ["length"] * 6 + ["chunked", "chunked", "gzip", "short", "long", "no number", "negative", "twice", "broken chunks"]
)
SENT = st.builds(lambda body, headers, framing: Sent(*body, headers, framing), bodies(), HEADERS, FRAMINGS)
NOT_HTTP = {"short", "no number", "negative", "twice", "broken chunks"}
"""Ways of framing with which what arrives is no request."""


def framed(body: bytes, framing: str) -> tuple[list[tuple[str, bytes]], bytes]:
    """Headers and bytes of a body."""
    for mark, meant in INFLATED.items():
        body = body.replace(mark, meant)
    if framing in ("chunked", "broken chunks"):
        half = len(body) // 2
        parts = [part for part in (body[:half], body[half:]) if part]
        data = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        return [("Transfer-Encoding", b"chunked")], data + (b"0\r\n\r\n" if framing == "chunked" else b"zz\r\n\r\n")
    if framing == "gzip":
        body = gzip.compress(body)
        return [("Content-Encoding", b"gzip"), ("Content-Length", b"%d" % len(body))], body
    lengths = {
        "short": [b"%d" % (len(body) // 2)],
        "long": [b"%d" % (len(body) + 9)],
        "no number": [b"abc"],
        "negative": [b"-1"],
        "twice": [b"%d" % len(body), b"%d" % (len(body) + 1)],
    }.get(framing, [b"%d" % len(body)])
    return [("Content-Length", length) for length in lengths], body


def request_of(method: bytes, path: bytes, headers: list[tuple[str, bytes]], data: bytes) -> bytes:
    head = [method + b" " + path + b" HTTP/1.1", b"Host: x"]
    return b"\r\n".join([*head, *(name.encode() + b": " + value for name, value in headers), b"", b""]) + data


class Answer(NamedTuple):
    status: int
    kind: str
    body: bytes


def exchange(address: tuple[str, int], request: bytes, *, hang_up: bool = False) -> Answer | None:
    """One request on a connection of its own, of which the client may end its half; None when the gateway hangs up
    without a word."""
    with socket.create_connection(address, timeout=GUARD_S) as sock:
        try:
            sock.sendall(request)
            if hang_up:
                sock.shutdown(socket.SHUT_WR)
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            return Answer(answer.status, answer.headers.get_content_type(), answer.read())
        except (ConnectionError, http.client.HTTPException):
            return None
        except OSError as error:
            # It had hung up before the client ended its half.
            if error.errno != errno.ENOTCONN:
                raise
            return None


# What comes back.


def check_answer(wire: Wire, answer: Answer) -> None:
    assert answer.status < 500, answer
    if answer.status == 200 and answer.kind == "text/event-stream":
        assert wire.terminator in answer.body or says_failed(wire, answer.body) or b"response.incomplete" in answer.body
    elif answer.status == 200:
        assert isinstance(json.loads(answer.body), dict)
    else:
        assert answer.status in (400, 413), answer
        assert read_refusal(wire.name, json.loads(answer.body))


def says_failed(wire: Wire, body: bytes) -> bool:
    return (b"event: error" if wire is ANTHROPIC else b'"error":') in body


# Who is asked.


def sing(ask: Ask) -> str:
    """What a policy may say: words, calls, calls of what is no tool, broken markup; to a canary, words alone."""
    if "-canary" in ask.prompt:
        return f"song {ask.number}"
    lines = [
        "fine",
        call_text("Bash", command="ls"),
        call_text("exec", command="ls") + call_text("n__exec"),
        '<tool_call>\n{"name": "Bash", "arguments": "[[[\n</tool_call>',
        "<think>\nhm\n</think>\n\n",
        "",
        '<tool_call>\n{"name": 5}\n</tool_call>\n\ufffd\u2028',
    ]
    return lines[ask.number % len(lines)]


@dataclass
class Canary:
    """A conversation of its own, whose words nobody else may see, and that must see nobody else's."""

    client: Client
    secret: str
    sung: list[Sampled] = field(default_factory=list)

    async def sing(self, engine: Engine) -> None:
        heard = len(engine.sampled)
        reply = await self.client.say(f"{self.secret} sings {len(self.sung)}")
        assert reply.status == 200, reply.raw
        [mine] = engine.sampled[heard:]
        before = self.sung[-1].prompt_ids + self.sung[-1].output_ids if self.sung else ()
        assert mine.prompt_ids[: len(before)] == before
        assert mine.prompt.count(self.secret) == mine.prompt.count(" sings ") == len(self.sung) + 1
        self.sung.append(mine)

    async def end(self, w: World) -> None:
        report = await w.finish(SessionId(self.secret))
        assert report.trajectory is not None
        [row] = report.trajectory.rows
        tokens = tuple(row.tokens_T.tolist())
        turns = [(tokens[:start], tokens[start:end]) for start, end in segments(row.loss_mask_T)]
        assert turns == [(one.prompt_ids, one.output_ids) for one in self.sung]


class Aviary:
    """A gateway on a thread of its own, canaries in it, and a session for what comes from outside."""

    def __init__(self, w: World, loop: asyncio.AbstractEventLoop) -> None:
        self.w = w
        self.path = ""
        self._loop = loop
        self._canaries: list[Canary] = []
        self._session = ""
        self._asked = self._heard = 0

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(2 * GUARD_S)

    @property
    def engine(self) -> Engine:
        return self.w.engines[0]

    async def begin(self) -> None:
        plenty = Budgets(max_turns=10**6, max_context_tokens=10**6)
        for secret, wire in (("red-canary", ANTHROPIC), ("blue-canary", CHAT), ("green-canary", RESPONSES)):
            client = await self.w.client(wire, session_id=secret, system="", spec={"budgets": plenty})
            self._canaries.append(Canary(client, secret))
        await self._open()

    async def _open(self) -> None:
        self._session = f"fuzz-{self._asked}"
        self.path = (await self.w.open(self._session)).removeprefix(self.w.url)

    async def look_after(self) -> None:
        """The gateway lives, whoever sings is heard alone, and the sums of what was tried are right."""
        report = await self.w.finish(SessionId(self._session))
        assert report.failures == ()
        assert report.sampled_tokens == report.trained_tokens + sum(report.masked.values())
        assert not any("-canary" in one.prompt for one in self.engine.sampled[self._heard :])
        for canary in self._canaries:
            await canary.sing(self.engine)
        self._heard = len(self.engine.sampled)
        await self._open()

    async def end(self) -> None:
        await self.look_after()
        for canary in self._canaries:
            await canary.end(self.w)

    def exchange(self, request: bytes, *, hang_up: bool = False) -> Answer | None:
        answer = exchange(address_of(self.w.url), request, hang_up=hang_up)
        self._asked += 1
        if self._asked % CHECK_EVERY == 0:
            self.run(self.look_after())
        return answer


@contextmanager
def loop_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="gateway")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(GUARD_S)
        loop.close()


@pytest.fixture(scope="module")
def aviary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aviary]:
    model_dir = QWEN3.write(tmp_path_factory.mktemp("qwen3"))
    with loop_thread() as loop:
        stop = asyncio.Event()
        ready: concurrent.futures.Future[World] = concurrent.futures.Future()

        async def serve() -> None:
            async with world(model_dir, sing, session_log_dir=tmp_path_factory.mktemp("state")) as w:
                ready.set_result(w)
                await stop.wait()

        serving = asyncio.run_coroutine_threadsafe(serve(), loop)
        try:
            aviary = Aviary(ready.result(GUARD_S), loop)
            aviary.run(aviary.begin())
            yield aviary
            aviary.run(aviary.end())
        finally:
            loop.call_soon_threadsafe(stop.set)
            serving.result(GUARD_S)


# Agents' routes.

FEW = settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=10_000)


def try_turn(aviary: Aviary, sent: Sent, *, count: bool) -> None:
    framing, data = framed(sent.body, sent.framing)
    path = sent.wire.path + ("/count_tokens" if count and sent.wire is ANTHROPIC else "")
    headers = [*sent.headers, *framing]
    request = request_of(b"POST", (aviary.path + path).encode(), headers, data)
    # Of a body whose end cannot come, more is waited for.
    answer = aviary.exchange(request, hang_up=sent.framing in ("long", "broken chunks"))
    if answer is None:
        assert sent.framing in NOT_HTTP | {"long"}
    elif answer.kind == "text/plain":
        # Refused by the parser of HTTP, which knows no wires.
        assert answer.status == 400
        assert sent.framing in NOT_HTTP or "Content-Encoding" in dict(headers)
    else:
        check_answer(sent.wire, answer)


@FEW
@given(sent=SENT, count=st.booleans())
def test_any_request_body_is_answered_or_refused(aviary: Aviary, sent: Sent, count: bool) -> None:
    try_turn(aviary, sent, count=count)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@MANY
@given(sent=SENT, count=st.booleans())
def test_ten_thousand_bodies_are_answered_or_refused(aviary: Aviary, sent: Sent, count: bool) -> None:
    try_turn(aviary, sent, count=count)


# Admin routes.

OPEN_ONE = {
    "session_id": "opened-1",
    "sampling": {"temperature": 0.5, "top_p": 0.9, "top_k": 5},
    "max_context_tokens": 2048,
    "budgets": {
        "max_turns": 2,
        "max_tokens_per_turn": 8,
        "max_context_tokens": 1024,
        "max_sampled_tokens": 99,
        "wall_s": 9.5,
        "final_text": "end",
    },
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "train_truncated": False,
}
FINISH = {"tree": True, "packed": False, "conversation": False}
NAMES = st.sampled_from(
    [b"opened-1", b"%ff", b"%ed%a0%80", b"%00", b"..%2f..%2fx", b"a/b", b"x" * 3000, b"%F0%9F%98%80"]
)


@st.composite
def admin_requests(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from(["open", "open", "finish", "finish", "forget"]))
    body: Any = OPEN_ONE if kind == "open" else FINISH
    data = draw(mutants(body) | st.binary(max_size=20))
    path = b"" if kind == "open" else b"/" + draw(NAMES)
    headers, data = framed(data, draw(FRAMINGS.filter(lambda framing: framing not in NOT_HTTP | {"long"})))
    token = draw(st.sampled_from([ADMIN.encode()] * 9 + [b"\xff", b"", b"other"]))
    headers = [("Authorization", b"Bearer " + token), *headers]
    path = b"/sessions" + path + (b"/finish" if kind == "finish" else b"")
    return request_of(b"DELETE" if kind == "forget" else b"POST", path, headers, data)


def try_admin(aviary: Aviary, request: bytes) -> None:
    answer = aviary.exchange(request)
    assert answer is not None
    assert answer.status in (200, 204, 400, 401, 409), answer
    if answer.status == 200 and b'"base_url"' in answer.body:
        document = json.loads(answer.body)
        aviary.run(use(aviary.w, document["session_id"], document["base_url"]))
    elif answer.status == 200:
        assert isinstance(json.loads(answer.body), dict)
    elif answer.status != 204:
        error = json.loads(answer.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert 5 < len(error["message"]) < 1000


async def use(w: World, session_id: str, base_url: str) -> None:
    """Whatever was asked for, a session that was opened works, and ends."""
    reply = await Client(w.http, base_url, CHAT).say("go")
    assert reply.status == 200 or reply.error["code"] == "context_length_exceeded", reply.raw
    assert (await w.finish(SessionId(session_id))).failures == ()


@settings(FEW, max_examples=200)
@given(request=admin_requests())
def test_any_admin_request_is_answered_or_refused(aviary: Aviary, request: bytes) -> None:
    try_admin(aviary, request)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(MANY, max_examples=3_000)
@given(request=admin_requests())
def test_thousands_of_admin_requests_are_answered_or_refused(aviary: Aviary, request: bytes) -> None:
    try_admin(aviary, request)
