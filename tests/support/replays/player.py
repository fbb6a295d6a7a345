"""Plays a session that is JSON (sessions.py) against a gateway, as its agent would."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import aiohttp

from support.gateway_rig import WIRES, Client, Reply
from support.replays.sessions import Json
from support.scripted_engine import Ask

MARKER = re.compile(r"mk\d+x")


class Script:
    """Script of the engine: the texts of the step whose last marker a prompt has last, in order."""

    def __init__(self) -> None:
        self._answers: defaultdict[str, list[str]] = defaultdict(list)

    def add(self, marker: str, answers: list[str]) -> None:
        self._answers[marker] += answers

    def __call__(self, ask: Ask) -> str:
        markers = MARKER.findall(ask.prompt)
        # An agent's results may stand in another order in the prompt than in its request.
        known = [marker for marker in reversed(markers) if self._answers.get(marker)]
        return self._answers[known[0]].pop(0)


@dataclass
class Played:
    """What was sent and served in a session: the bodies as they went out, and the replies, step by step."""

    session: Json
    bodies: list[Json] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)


async def play(session: Json, http: aiohttp.ClientSession, base_url: str, script: Script) -> Played:
    """Play the steps in order, those with an equal `at` at once."""
    wire = next(wire for wire in WIRES if wire.path == session["path"])
    played, steps = Played(session), session["steps"]

    async def send(step: Json, body: Json) -> Reply:
        client = Client(http, base_url, wire, headers=session["headers"] | step["headers"])
        reply = await client.send(body)
        assert reply.status == step["expects"], reply.raw
        return reply

    for _, group in groupby(steps, key=lambda step: step["at"]):
        together = list(group)
        bodies = [filled(copy.deepcopy(step["body"]), wire, played.replies) for step in together]
        for step, body in zip(together, bodies, strict=True):
            if step["answers"]:
                script.add(last_marker(body), step["answers"])
        played.bodies += bodies
        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(send(step, body)) for step, body in zip(together, bodies, strict=True)]
        played.replies += [task.result() for task in sent]
    return played


def last_marker(body: Json) -> str:
    entries = body.get("messages") or body["input"]
    return str(MARKER.findall(json.dumps(entries, ensure_ascii=False))[-1])


def filled(value: Any, wire: Any, replies: list[Reply]) -> Any:
    """Return a body with the answers that were served in place of their names."""
    if isinstance(value, list):
        return [entry for part in value for entry in entries_of(part, wire, replies)]
    if not isinstance(value, dict):
        return value
    if "$call" in value:
        step, index = value["$call"]
        return replies[step].calls[index][0]
    return {key: filled(entry, wire, replies) for key, entry in value.items()}


def entries_of(part: Any, wire: Any, replies: list[Reply]) -> list[Any]:
    """Return the entries of a list that one of its parts stands for."""
    if isinstance(part, dict) and "$echo" in part:
        echoed: list[Any] = copy.deepcopy(wire.echo(replies[part["$echo"]].kept))
        for change in part["changes"]:
            for entry in echoed:
                CHANGES[change](entry)
        return echoed
    if isinstance(part, dict) and "$joined" in part:
        texts = (one if isinstance(one, str) else replies[one["$text"]].text for one in part["$joined"])
        return [{"role": "assistant", "content": "".join(texts)}]
    return [filled(part, wire, replies)]


# What agents change in an answer: an Anthropic message, or one of Chat Completions.


def calls_of(message: Json) -> Iterator[Json]:
    """Yield the blocks of Anthropic's calls, whose input may be changed."""
    return (block for block in message["content"] if block["type"] == "tool_use")


def text_first(message: Json) -> None:
    message["content"].sort(key=lambda block: block["type"] == "tool_use")


def drop_blank_text(message: Json) -> None:
    message["content"] = [one for one in message["content"] if one["type"] != "text" or one["text"].strip()]


def drop_text(message: Json) -> None:
    message["content"] = [one for one in message["content"] if one["type"] != "text"]


def no_reasoning(message: Json) -> None:
    message["content"] = [one for one in message["content"] if one["type"] != "thinking"]


def trim_lines(message: Json) -> None:
    for call in calls_of(message):
        for key, value in call["input"].items():
            if isinstance(value, str):
                call["input"][key] = "\n".join(line.rstrip() for line in value.split("\n"))


def add_defaults(message: Json) -> None:
    for call in calls_of(message):
        call["input"] = {"replace_all": False} | dict(reversed(call["input"].items()))


def types(message: Json) -> None:
    for call in calls_of(message):
        for key, value in {"timeout": 5000, "run_in_background": False}.items():
            if key in call["input"]:
                call["input"][key] = value


def drop_folder(message: Json) -> None:
    for call in calls_of(message):
        if isinstance(command := call["input"].get("command"), str):
            call["input"]["command"] = command.removeprefix("cd /workspace && ")


def trim(message: Json) -> None:
    for call in calls_of(message):
        call["input"] = {"command": "(trimmed)"}


def rename(message: Json) -> None:
    for call in calls_of(message):
        call["name"] = "edit"


def compact(message: Json) -> None:
    for call in message.get("tool_calls") or ():
        given = json.loads(call["function"]["arguments"])
        # As JavaScript does it: no blanks, no escapes, 1.0 is 1.
        given = {key: int(value) if value == 1.0 else value for key, value in given.items()}
        call["function"]["arguments"] = json.dumps(given, separators=(",", ":"), ensure_ascii=False)


def null_content(message: Json) -> None:
    message["content"] = message["content"] or None


CHANGES = {
    "text first": text_first,
    "drop blank text": drop_blank_text,
    "drop text": drop_text,
    "no reasoning": no_reasoning,
    "trim lines": trim_lines,
    "add defaults": add_defaults,
    "types": types,
    "drop folder": drop_folder,
    "trim": trim,
    "rename": rename,
    "compact": compact,
    "null content": null_content,
}
