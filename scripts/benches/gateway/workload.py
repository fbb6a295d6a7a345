"""The workload of the gateway bench: texts of the measured agents and answers of the scripted engine.

Invariants:
- An agent-sized turn has 18 tools, a system prompt of 30 KB and 4,000 characters of tool output; after 20 of them a
  conversation has about 36,000 tokens.
- Conversations share only the tools and the system prompt, so that texts cached for one are of no use to another.
- A seed determines every text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import orjson

from benches.gateway.model import END, code, prose

if TYPE_CHECKING:
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
    """Sampled answer of the engine: `ids` including the end of the turn, and their `text` without it."""

    ids: tuple[int, ...]
    text: str


class Texts:
    """Seeded generator of pieces of prose and code."""

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
    """Return a Messages request like Claude Code's, without messages and with the given number of tools."""
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
    described = []
    for name, parameters in _PARAMETERS.items():
        kinds = dict(parameter.split(":") for parameter in parameters.split())
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                key: {"type": kind, "description": texts.prose(60)}
                | ({"items": {"type": "string"}} if kind == "array" else {})
                for key, kind in kinds.items()
            },
            "required": list(kinds)[:1],
            "additionalProperties": False,
        }
        described.append({"name": name, "description": texts.prose(_DESCRIPTION_CHARACTERS), "input_schema": schema})
    return head | {"tools": described[:tools]}


def answers(tokenizer: Tokenizer) -> list[Answer]:
    """Return turns of a policy, each with some reasoning, a sentence and a call."""
    texts, found = Texts(2), []
    for number in range(ANSWERS):
        arguments: dict[str, Any] = {"command": f"sed -n {number}p {texts.code(80)}", "description": texts.prose(40)}
        name = "Bash"
        if number % 4 == 0:
            name, edit = "Edit", {"old_string": texts.code(120), "new_string": texts.code(120)}
            arguments = {"file_path": "/workspace/calc.py"} | edit
        call = orjson.dumps({"name": name, "arguments": arguments}).decode()
        reasoning, sentence = texts.prose(160).strip(), texts.prose(80).strip()
        text = f"<think>\n{reasoning}\n</think>\n\n{sentence}\n<tool_call>\n{call}\n</tool_call>"
        found.append(Answer(ids=tuple(tokenizer.encode(text + END, add_special_tokens=False).ids), text=text))
    return found


def outputs(seed: int, characters: Sequence[int]) -> list[str]:
    """Return the tool outputs, turn by turn."""
    texts = Texts(seed)
    return [texts.code(length) for length in characters]
