"""What the measured agents say and what the scripted engine answers.

Invariants:
- An agent-sized turn has 18 tools, a system prompt of 30 KB and 4,000 characters of tool output; after 20 of them a
  conversation has about 36,000 tokens.
- No two conversations share a text but tools and system prompt: what is cached of one does not serve another.
- A seed decides every text.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from benches.gateway.model import END, code, prose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer

SYSTEM_CHARACTERS: Final = 30_000
OUTPUT_CHARACTERS: Final = 4_096
TURNS: Final = 20
ANSWERS: Final = 64

_DESCRIPTION_CHARACTERS: Final = 640
_PARAMETERS: Final = {
    "Bash": "command:string description:string timeout:integer run_in_background:boolean",
    "Task": "description:string prompt:string subagent_type:string",
    "Glob": "pattern:string path:string",
    "Grep": "pattern:string path:string glob:string output_mode:string context:integer multiline:boolean",
    "Read": "file_path:string offset:integer limit:integer",
    "Edit": "file_path:string old_string:string new_string:string replace_all:boolean",
    "MultiEdit": "file_path:string edits:array",
    "Write": "file_path:string content:string",
    "NotebookEdit": "notebook_path:string cell_id:string new_source:string cell_type:string edit_mode:string",
    "WebFetch": "url:string prompt:string",
    "WebSearch": "query:string allowed_domains:array blocked_domains:array",
    "TodoWrite": "todos:array",
    "TodoRead": "filter:string",
    "BashOutput": "bash_id:string filter:string",
    "KillShell": "shell_id:string",
    "Skill": "command:string",
    "SlashCommand": "command:string",
    "ExitPlanMode": "plan:string",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the engine samples: `ids` with the end of the turn, spelled `text`."""

    ids: tuple[int, ...]
    text: str


class Texts:
    """Pieces of prose and code, by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def prose(self, characters: int) -> str:
        return self._piece(prose(), characters)

    def code(self, characters: int) -> str:
        return self._piece(code(), characters)

    def _piece(self, source: str, characters: int) -> str:
        start = self._random.randrange(len(source) - characters)
        return source[start : start + characters]


def request_head(*, system_characters: int = SYSTEM_CHARACTERS, tools: int = len(_PARAMETERS)) -> dict[str, Any]:
    """A Messages request as Claude Code writes it, without its messages; with so many tools."""
    texts = Texts(1)
    head: dict[str, Any] = {
        "model": "claude-opus-4-8",
        "max_tokens": 32_000,
        "stream": True,
        "system": [
            {"type": "text", "text": "You are an agent that mends software."},
            {"type": "text", "text": texts.prose(system_characters), "cache_control": {"type": "ephemeral"}},
        ],
        "metadata": {"user_id": '{"session_id": "0"}'},
        "thinking": {"type": "adaptive"},
    }
    return head | {"tools": _tools(texts)[:tools]}


def _tools(texts: Texts) -> list[dict[str, Any]]:
    tools = []
    for name, parameters in _PARAMETERS.items():
        kinds = dict(parameter.split(":") for parameter in parameters.split())
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {key: _property(kind, texts) for key, kind in kinds.items()},
            "required": list(kinds)[:1],
            "additionalProperties": False,
        }
        tools.append({"name": name, "description": texts.prose(_DESCRIPTION_CHARACTERS), "input_schema": schema})
    return tools


def _property(kind: str, texts: Texts) -> dict[str, Any]:
    described = {"type": kind, "description": texts.prose(60)}
    return described | ({"items": {"type": "string"}} if kind == "array" else {})


def answers(tokenizer: Tokenizer) -> list[Answer]:
    """Turns of a policy: some reasoning, a sentence, a call."""
    texts = Texts(2)
    return [_answer(tokenizer, texts, number) for number in range(ANSWERS)]


def _answer(tokenizer: Tokenizer, texts: Texts, number: int) -> Answer:
    arguments: dict[str, Any] = {"command": f"sed -n {number}p {texts.code(80)}", "description": texts.prose(40)}
    name = "Bash"
    if number % 4 == 0:
        name = "Edit"
        arguments = {"file_path": "/workspace/calc.py", "old_string": texts.code(120), "new_string": texts.code(120)}
    call = orjson.dumps({"name": name, "arguments": arguments}).decode()
    reasoning, said = texts.prose(160).strip(), texts.prose(80).strip()
    text = f"<think>\n{reasoning}\n</think>\n\n{said}\n<tool_call>\n{call}\n</tool_call>"
    return Answer(ids=tuple(tokenizer.encode(text + END, add_special_tokens=False).ids), text=text)


def outputs(seed: int, characters: Sequence[int]) -> list[str]:
    """What the tools print, turn by turn."""
    texts = Texts(seed)
    return [texts.code(length) for length in characters]
