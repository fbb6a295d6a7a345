"""The Chat Completions client of white-box agents, which returns one answer per request.

Invariants:
- The service's replies are typed: a full context ends an agent, and every other refusal or failure is an error.
- A request is retried only while the gateway does not answer (because it is restarting), and the gateway counts the
  retries as the same turn. An answer is final, since the gateway itself retries engines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal, Protocol

import aiohttp
from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from headrace.serve.gateway.dialects.chat import COMPLETION_PREFIX, KIND, WARNING

CONTEXT_CODES = frozenset({"context_length_exceeded"})
UNREACHED_S = 30.0
"""The agent fails after the service has been unreachable for this time; waiting until the agent's own deadline would
look like an exhausted budget."""
_UNTIL_ANSWERED = AsyncRetrying(
    retry=retry_if_exception_type((aiohttp.ClientConnectionError, aiohttp.ClientPayloadError)),
    wait=wait_random_exponential(multiplier=0.1, max=2.0),
    stop=stop_after_delay(UNREACHED_S),
    reraise=True,
)


class ChatFailed(Exception):
    """The service did not answer with a completion.

    `status` is None when there was no answer; `code` is the error code of the service.
    """

    def __init__(self, message: str, status: int | None = None, code: str = "") -> None:
        super().__init__(message, status, code)
        self.status = status
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class ChatContextExceeded(ChatFailed):
    """The conversation no longer fits in the context, which ends the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTool:
    """A tool that the policy is offered. `parameters` is a JSON schema."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A tool call. `arguments` is the JSON text that was sampled; it may be invalid."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of the conversation. `calls` are those of an assistant message; `call_id` is the call that a tool
    message answers. The characters `[start, end)` of each of the `warnings`, in ascending order, are remarks about the
    policy's answer, whose tokens get a kind of their own in sessions that may mark warnings."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    calls: tuple[ChatCall, ...] = ()
    call_id: str = ""
    warnings: tuple[tuple[int, int], ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the message in the form of the Chat Completions API."""
        document: dict[str, object] = {"role": self.role, "content": self._parts() if self.warnings else self.content}
        if self.calls:
            document["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        if self.role == "tool":
            document["tool_call_id"] = self.call_id
        return document

    def _parts(self) -> list[dict[str, str]]:
        """Return the content as text parts, of which the warnings are marked."""
        cuts = [0, *(at for span in self.warnings for at in span), len(self.content)]
        parts: list[dict[str, str]] = []
        for number, (start, end) in enumerate(pairwise(cuts)):
            if start < end:
                mark = {KIND: WARNING} if number % 2 else {}
                parts.append({"type": "text", "text": self.content[start:end]} | mark)
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """The policy's answer. `finish_reason` is `stop`, `tool_calls`, or `length` if the answer was truncated. With stop
    strings, `text` includes the one that ended the answer. `id` is the service's id of the completion."""

    text: str
    finish_reason: str
    calls: tuple[ChatCall, ...] = ()
    id: str = ""

    @property
    def turn_id(self) -> str:
        """Id of the turn in the gateway's report of the session; empty if another service answered."""
        return self.id.removeprefix(COMPLETION_PREFIX) if self.id.startswith(COMPLETION_PREFIX) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Further fields of a request. `continues` lets the policy continue the last message, which is an assistant
    message; text that was inserted into it since the policy's last answer is an observation."""

    tools: tuple[ChatTool, ...] = ()
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    continues: bool = False
    raw: bool = False
    """Return the sampled text as it is, reasoning included; not with tools."""

    def to_json(self) -> dict[str, object]:
        """Return the fields in the form of the Chat Completions API and, for stop strings and continued messages, of
        vLLM and SGLang."""
        document: dict[str, object] = {}
        if self.tools:
            document["tools"] = [
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
                }
                for tool in self.tools
            ]
        if self.stop:
            document |= {"stop": list(self.stop), "include_stop_str_in_output": True}
        if self.max_tokens is not None:
            document["max_tokens"] = self.max_tokens
        if self.raw:
            document["separate_reasoning"] = False
        if self.continues:
            document |= {"continue_final_message": True, "add_generation_prompt": False}
        return document


PLAIN: Final = ChatOptions()
"""A request with the messages alone."""


class Chat(Protocol):
    """Interface to the policy as a chat."""

    async def __call__(self, messages: Sequence[ChatMessage], options: ChatOptions = PLAIN) -> ChatReply:
        """Return the answer to the conversation. Raises ChatContextExceeded, ChatFailed."""

    async def count(self, messages: Sequence[ChatMessage]) -> int:
        """Return the number of tokens in the prompt of the messages. Raises ChatFailed."""


class NoChat:
    """Placeholder for `Chat` in runs without a gateway; every call fails."""

    async def __call__(self, messages: Sequence[ChatMessage], options: ChatOptions = PLAIN) -> ChatReply:
        """Always raises ChatFailed."""
        raise ChatFailed("this run has simulated engines and no gateway: choose an agent that does not chat")

    async def count(self, messages: Sequence[ChatMessage]) -> int:
        """Always raises ChatFailed."""
        raise ChatFailed("this run has simulated engines and no gateway: choose an agent that does not chat")


class ChatClient:
    """Client of `POST {base_url}/v1/chat/completions`. Each call is one turn of the policy."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        *,
        model: str = "policy",
        max_tokens: int | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Without `timeout_s`, only the agent's deadline applies."""
        self._session = session
        self.url = f"{base_url.rstrip('/')}/v1/chat/completions"
        self._tokenize_url = f"{base_url.rstrip('/')}/v1/tokenize"
        self._model = model
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s

    async def __call__(self, messages: Sequence[ChatMessage], options: ChatOptions = PLAIN) -> ChatReply:
        """Return the answer to the conversation. Raises ChatContextExceeded, ChatFailed."""
        body = self._body(messages)
        if self._max_tokens is not None:
            body["max_tokens"] = self._max_tokens
        return parse_answer(*await self._answered(self.url, body | options.to_json()))

    async def count(self, messages: Sequence[ChatMessage]) -> int:
        """Return the number of tokens in the prompt of the messages. Raises ChatFailed."""
        status, answer = await self._answered(self._tokenize_url, self._body(messages))
        match answer:
            case {"count": int() as count} if status == 200:
                return count
            case _:
                raise refusal(status, answer)

    def _body(self, messages: Sequence[ChatMessage]) -> dict[str, object]:
        return {"model": self._model, "messages": [message.to_json() for message in messages]}

    async def _answered(self, url: str, body: dict[str, object]) -> tuple[int, object]:
        """Post a request until it is answered, and return the status and the decoded body. Raises ChatFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _UNTIL_ANSWERED(self._post, url, body)
        except TimeoutError as error:
            raise ChatFailed(f"no answer from {url} within {self._timeout_s} s (timeout_s)") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise ChatFailed(f"no usable answer from {url}: {type(error).__name__}: {error}") from error

    async def _post(self, url: str, body: dict[str, object]) -> tuple[int, object]:
        """Post a request, and return the status and the decoded body."""
        no_timeout = aiohttp.ClientTimeout(total=None)
        async with self._session.post(url, json=body, timeout=no_timeout) as response:
            return response.status, await response.json(content_type=None)


def parse_answer(status: int, answer: object) -> ChatReply:
    """Parse the reply from a decoded body. Raises ChatContextExceeded, ChatFailed."""
    if status != 200:
        raise refusal(status, answer)
    match answer:
        case {
            "choices": [{"message": {"content": str() | None as text, **message}, "finish_reason": str() as end}, *_],
            **rest,
        }:
            calls = tuple(_calls(message.get("tool_calls")))
            return ChatReply(text=text or "", finish_reason=end, calls=calls, id=str(rest.get("id") or ""))
        case _:
            raise ChatFailed("the answer is not a chat completion: choices[0].message.content is missing", status)


def _calls(entries: object) -> Iterator[ChatCall]:
    for entry in entries if isinstance(entries, list) else ():
        match entry:
            case {"id": str() as call_id, "function": {"name": str() as name, "arguments": str() as arguments}}:
                yield ChatCall(id=call_id, name=name, arguments=arguments)


def refusal(status: int, answer: object) -> ChatFailed:
    """Return the error for an OpenAI error body."""
    match answer:
        case {"error": {"message": str() as message, **rest}}:
            code = str(rest.get("code") or rest.get("type") or "")
        case _:
            message, code = "no error body", ""
    kind = ChatContextExceeded if code in CONTEXT_CODES else ChatFailed
    return kind(f"the service answered {status} ({code or 'no code'}): {message}", status, code)
