"""Sessions of agents as JSON: what each agent style sends, request by request, and what the policy samples.

A session is `{"style", "path", "headers", "echoes", "steps"}`; `echoes` is true if the agent sends the policy's turns
back. A step is `{"body", "answers", "headers", "at", "expects"}`: its request body, the texts that are sampled for it,
further headers, a number that concurrent steps have in common, and the status of the answer (200). In a body,
`{"$echo": N, "changes": [...]}` in a list stands for what step N was served, changed as player.py says, `{"$call": [N,
I]}` for the id of its I-th call, and `{"$joined": [...]}` for a message of the policy's of texts and of `{"$text": N}`,
the text that step N was served.

Every text that an agent or the policy writes has markers, `mk1x`, `mk2x` and so on, each only once in a session; in
reasoning they are `rk1x`. The last marker of a request tells the scripted engine which step it belongs to.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, TypeAlias

Json: TypeAlias = "dict[str, Any]"

CLAUDE, CODEX = "claude-cli/2.1.197 (external, cli)", "codex_exec/0.169.0"
FOLDER = "/workspace"


class Writer:
    """Writer of one session: markers, answers of the policy, and steps."""

    def __init__(self, seed: int, style: str, path: str, *, echoes: bool, **headers: str) -> None:
        self.random = random.Random(f"{style} {seed}")
        self.session: Json = {"style": style, "path": path, "headers": headers, "echoes": echoes, "steps": []}
        self._markers = 0
        self._at = 0

    def words(self, *, kind: str = "mk", least: int = 1, most: int = 6) -> str:
        """Words with one marker among them."""
        self._markers += 1
        words = [self.random.choice(WORDS) for _ in range(self.random.randint(least, most))]
        words.insert(self.random.randint(0, len(words)), f"{kind}{self._markers}x")
        return " ".join(words)

    def answer(self, *calls: Json, text: bool | None = None, thinks: bool = False) -> str:
        """What the policy samples, in the form of Qwen3: reasoning, text, calls."""
        parts = [f"<think>\n{self.words(kind='rk', most=20)}\n</think>\n\n"] if thinks else []
        if text or (text is None and (not calls or self.random.random() < 0.5)):
            parts.append(self.words(most=30) + ("\n" if calls else ""))
        parts += [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>\n" for call in calls]
        return "".join(parts)

    def call(self, name: str = "bash", **arguments: Any) -> Json:
        return {"name": name, "arguments": {"command": self.words(), **arguments}}

    def step(self, body: Json, *answers: str, at: int | None = None, expects: int = 200, **headers: str) -> int:
        """Add a step; return its number."""
        steps = self.session["steps"]
        self._at = self._at + 1 if at is None else at
        steps.append({"body": body, "answers": list(answers), "headers": headers, "at": self._at, "expects": expects})
        return len(steps) - 1

    @property
    def now_at(self) -> int:
        return self._at

    @property
    def next_at(self) -> int:
        return self._at + 1


WORDS = ("look", "at", "the", "file", "then", "mend", "it", "über", "naïve", "日本", "x = 1", "#", "done", "a/b.py")
PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}, "n": {"type": "integer"}}}


# What the bodies of the APIs look like.


def anthropic(messages: list[Any], *, system: str, tools: tuple[str, ...] = ()) -> Json:
    body: Json = {"model": "claude-opus-4-8", "max_tokens": 4096, "stream": True, "messages": messages}
    body["system"] = [{"type": "text", "text": system, "cache_control": {"type": "ephemeral"}}]
    return body | {"tools": [{"name": name, "description": "d", "input_schema": PARAMETERS} for name in tools]}


def chat(messages: list[Any], *, tools: tuple[str, ...] = ("bash",), **fields: Any) -> Json:
    functions = [{"name": name, "description": "d", "parameters": PARAMETERS} for name in tools]
    offered = {"tools": [{"type": "function", "function": function} for function in functions]} if tools else {}
    options = {"stream_options": {"include_usage": True}}
    return {"model": "gpt-x", "messages": messages} | options | offered | fields


def responses(items: list[Any], *, tools: tuple[str, ...] = ("exec_command",)) -> Json:
    offered = [{"type": "function", "name": name, "description": "d", "parameters": PARAMETERS} for name in tools]
    return {"model": "gpt-x-codex", "stream": True, "store": False, "input": items, "tools": offered}


def told(text: Any, role: str = "user") -> Json:
    return {"role": role, "content": text}


def item(text: str, role: str = "user") -> Json:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def claude_result(step: int, index: int, text: str) -> Json:
    return {"type": "tool_result", "tool_use_id": {"$call": [step, index]}, "content": text}


def chat_result(step: int, index: int, text: str) -> Json:
    return {"role": "tool", "tool_call_id": {"$call": [step, index]}, "content": text}


def codex_result(step: int, index: int, text: str) -> Json:
    return {"type": "function_call_output", "call_id": {"$call": [step, index]}, "output": text}


def echo(step: int, *changes: str) -> Json:
    return {"$echo": step, "changes": list(changes)}


# The styles.


def claude_code(seed: int) -> Json:
    """A title, turns with changed echoes and parallel calls, two subagents at once, a compaction."""
    w = Writer(seed, "claude-code", "/v1/messages", echoes=True, **{"User-Agent": CLAUDE})
    system, tools = f"You mend {w.words()}", ("bash", "edit", "agent")
    history: list[Any] = [told(w.words())]
    first = w.step(anthropic([*history], system=system, tools=tools), claude_turn(w, 2))
    w.step(anthropic([told(w.words())], system=f"Write a title {w.words()}"), w.words(most=2), at=w.now_at)
    calls, last = 2, first
    for _ in range(w.random.randint(3, 8)):
        results = [claude_result(last, index, w.words(most=40)) for index in range(calls)]
        if w.random.random() < 0.3:
            results.reverse()
        history += [echo(last, *claude_changes(w)), told(results)]
        if w.random.random() < 0.3:
            history.append(told(w.words(), "system"))
        calls = w.random.randint(1, 3)
        last = w.step(anthropic([*history], system=system, tools=tools), claude_turn(w, calls))
    if w.random.random() < 0.7:
        subagents(w)
    history += [echo(last), told([claude_result(last, index, w.words()) for index in range(calls)])]
    if w.random.random() < 0.7:
        compaction(w, history, system, tools)
    else:
        w.step(anthropic([*history], system=system, tools=tools), w.answer(text=True))
    return w.session


def claude_turn(w: Writer, calls: int) -> str:
    told_of = {"timeout": "5000", "run_in_background": "false"} if w.random.random() < 0.5 else {}
    made = [w.call("bash", **told_of) for _ in range(calls)]
    for call in made:
        if w.random.random() < 0.5:
            call["arguments"]["command"] = f"cd {FOLDER} && {call['arguments']['command']}"
        call["arguments"]["content"] = f"a  \n{w.words()}   \nb"
    answer = w.answer(*made, thinks=w.random.random() < 0.7)
    return answer + w.random.choice(["", "\n" + w.words()])


def claude_changes(w: Writer) -> list[str]:
    every = ["text first", "drop blank text", "trim lines", "add defaults", "types", "drop folder"]
    return [*w.random.sample(every, w.random.randint(0, len(every))), *w.random.choice([[], ["no reasoning"]])]


def subagents(w: Writer) -> None:
    """Two conversations at once, each with a system prompt of its own."""
    at = w.next_at
    for name in "AB":
        own = f"You explore {w.words()}"
        headers: dict[str, Any] = {"x-claude-code-agent-id": f"agent-{name}"}
        asked = [told(w.words())]
        one = w.step(anthropic(asked, system=own, tools=("bash",)), w.answer(w.call()), at=at, **headers)
        then = [*asked, echo(one), told([claude_result(one, 0, w.words())])]
        w.step(anthropic(then, system=own, tools=("bash",)), w.answer(text=True), at=at + 1, **headers)


def compaction(w: Writer, history: list[Any], system: str, tools: tuple[str, ...]) -> None:
    """The order to summarise stands inside the last user message; then comes a new window with the summary."""
    asked = history[-1]["content"]
    order = {"type": "text", "text": f"CRITICAL: Respond with TEXT ONLY {w.words()}"}
    summary = w.words(most=30)
    w.step(anthropic([*history[:-1], told([*asked, order])], system=system, tools=tools), summary)
    window: list[Any] = [told(f"This goes on. {summary} {w.words()}")]
    one = w.step(anthropic([*window], system=system, tools=tools), w.answer(w.call()))
    window += [echo(one), told([claude_result(one, 0, w.words())])]
    w.step(anthropic([*window], system=system, tools=tools), w.answer(text=True))


def codex(seed: int) -> Json:
    """Echoes byte for byte, parallel calls, and a new window after a summary."""
    w = Writer(seed, "codex", "/v1/responses", echoes=True, **{"User-Agent": CODEX})
    head = [item(w.words(), "developer"), item(w.words(), "developer"), item(w.words()), item(w.words())]
    items: list[Any] = [*head]
    for _ in range(w.random.randint(3, 9)):
        calls = w.random.randint(1, 3)
        made = [w.call("exec_command") for _ in range(calls)]
        one = w.step(responses([*items]), w.answer(*made, thinks=w.random.random() < 0.7))
        items += [echo(one), *(codex_result(one, index, w.words(most=30)) for index in range(calls))]
    one = w.step(responses([*items]), w.answer(text=True))
    items += [echo(one), item(f"CONTEXT CHECKPOINT COMPACTION {w.words()}")]
    summary = w.words(most=30)
    w.step(responses([*items], tools=()), summary)
    w.step(responses([*head, item(summary + w.words())]), w.answer(text=True))
    return w.session


def mini_swe(seed: int) -> Json:
    """Linear turns with one tool and exact echoes."""
    w = Writer(seed, "mini-swe-agent", "/v1/chat/completions", echoes=True)
    messages: list[Any] = [told(w.words(), "system"), told(w.words())]
    for _ in range(w.random.randint(3, 15)):
        one = w.step(chat([*messages]), w.answer(w.call(), thinks=w.random.random() < 0.5))
        messages += [echo(one), chat_result(one, 0, w.words(most=40))]
    return w.session


def text_loop(seed: int) -> Json:
    """Linear turns in plain text."""
    w = Writer(seed, "text-loop", "/v1/chat/completions", echoes=True)
    messages: list[Any] = [told(w.words(), "system"), told(w.words())]
    for _ in range(w.random.randint(3, 15)):
        one = w.step(chat([*messages], tools=()), w.answer(thinks=w.random.random() < 0.5))
        messages += [echo(one), told(w.words(most=40))]
    return w.session


def malformed(seed: int) -> Json:
    """An answer without a call is not sent back: the agent tells the policy what was wrong and asks again."""
    w = Writer(seed, "malformed", "/v1/chat/completions", echoes=False)
    messages: list[Any] = [told(w.words(), "system"), told(w.words())]
    for number in range(w.random.randint(2, 5)):
        if number % 2:
            w.step(chat([*messages]), w.answer(text=True))
            messages.append(told(f"No call was found {w.words()}"))
        one = w.step(chat([*messages]), w.answer(w.call()))
        messages += [echo(one), chat_result(one, 0, w.words())]
    return w.session


def respelled(seed: int, style: str, *changes: str, title: bool = False, fabricated: bool = False) -> Json:
    w = Writer(seed, style, "/v1/chat/completions", echoes=True, **{"User-Agent": f"{style}/1.0"})
    messages: list[Any] = [told(w.words(), "system"), told(w.words())]
    if fabricated:
        messages += [told("Got it.", "assistant"), told(w.words())]
    at = w.next_at
    if title:
        asked = [told(w.words(), "system"), told(w.words()), told(w.words())]
        w.step(chat(asked, tools=()), w.words(most=2), at=at)
    for _ in range(w.random.randint(8, 15)):
        calls = w.random.randint(1, 2)
        made = [w.call("bash", n=1.0) for _ in range(calls)]
        streams = w.random.random() < 0.5
        body = chat([*messages], tools=("bash", "edit"), stream=streams)
        one = w.step(body, w.answer(*made, thinks=w.random.random() < 0.5), at=at)
        at = w.next_at
        messages += [echo(one, *changes), *(chat_result(one, index, w.words(most=30)) for index in range(calls))]
    return w.session


def qwen_code(seed: int) -> Json:
    return respelled(seed, "qwen-code", "compact", "null content", fabricated=True)


def opencode(seed: int) -> Json:
    return respelled(seed, "opencode", "compact", title=True)


def search_loop(seed: int) -> Json:
    """An agent with inline search: the policy goes on within its own message after each result."""
    w = Writer(seed, "search-loop", "/v1/chat/completions", echoes=True)
    head = [told(w.words(), "system"), told(w.words())]
    said: list[Any] = []
    options: Json = {"tools": (), "stop": ["</search>"], "include_stop_str_in_output": True}
    for number in range(w.random.randint(2, 5)):
        text = f"{w.words()} <search>{w.words()}</search>"
        if not said:
            one = w.step(chat([*head], **options), text)
        else:
            one = w.step(chat([*head, {"$joined": [*said]}], continue_final_message=True, **options), text)
        said += [{"$text": one}, f"\n\n<information>{w.words()} {number}</information>\n\n"]
    w.step(chat([*head, {"$joined": [*said]}], continue_final_message=True, **options), w.words())
    return w.session


def judge(seed: int) -> Json:
    """Never sends a turn back: it tells the history in further user messages."""
    w = Writer(seed, "judge", "/v1/chat/completions", echoes=False)
    messages: list[Any] = [told(w.words(), "system")]
    for _ in range(w.random.randint(3, 8)):
        messages.append(told(w.words()))
        w.step(chat([*messages], tools=()), w.words(most=20))
    return w.session


def planner(seed: int) -> Json:
    """Calls without tools beside an agent with tools."""
    w = Writer(seed, "planner", "/v1/chat/completions", echoes=False)
    messages: list[Any] = [told(w.words(), "system"), told(w.words())]
    for _ in range(w.random.randint(2, 5)):
        w.step(chat([told(w.words(), "system"), told(w.words())], tools=()), w.words(most=20))
        one = w.step(chat([*messages]), w.answer(w.call()))
        messages += [echo(one), chat_result(one, 0, w.words())]
    return w.session


def voter(seed: int) -> Json:
    """Equal requests at once and one after the other, whose answers are all samples; it goes on with one of them."""
    w = Writer(seed, "voter", "/v1/chat/completions", echoes=False)
    messages: list[Any] = [told(w.words(), "system"), told(w.words())]
    for _ in range(w.random.randint(2, 4)):
        number, at = w.random.randint(2, 4), w.next_at
        votes = [w.answer(text=True) for _ in range(number)]
        steps = [w.step(chat([*messages], tools=()), *(votes if not index else ()), at=at) for index in range(number)]
        messages += [echo(w.random.choice(steps)), told(w.words())]
    return w.session


def editor(seed: int) -> Json:
    """Trims, replaces and drops parts of its history, under the ids that it was served."""
    w = Writer(seed, "editor", "/v1/messages", echoes=False)
    system, tools = w.words(), ("bash", "edit")
    history: list[Any] = [told(w.words())]
    for _ in range(w.random.randint(4, 9)):
        one = w.step(anthropic([*history], system=system, tools=tools), w.answer(w.call(), w.call()))
        results = [claude_result(one, index, w.words(most=30)) for index in range(2)]
        history += [echo(one), told(results)]
        echoes = [index for index, entry in enumerate(history) if "$echo" in entry]
        chosen = w.random.choice(echoes)
        match w.random.choice(["", "trim", "rename", "drop result", "drop text"]):
            case "trim" | "rename" | "drop text" as change:
                history[chosen] = echo(history[chosen]["$echo"], change)
            case "drop result":
                history[chosen + 1] = told(history[chosen + 1]["content"][:1])
    return w.session


STYLES: dict[str, Callable[[int], Json]] = {
    "claude-code": claude_code,
    "codex": codex,
    "mini-swe-agent": mini_swe,
    "text-loop": text_loop,
    "qwen-code": qwen_code,
    "opencode": opencode,
    "search-loop": search_loop,
    "malformed": malformed,
    "judge": judge,
    "planner": planner,
    "voter": voter,
    "editor": editor,
}
