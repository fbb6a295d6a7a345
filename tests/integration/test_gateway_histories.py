"""Changes that agents make to their histories, over real HTTP with a template like Qwen3's: no sampled token is lost or
trained twice, and rows are the real conversations."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import Budgets, TrainedPart
from support.gateway_rig import ANTHROPIC, CHAT, RESPONSES, WIRES, Client, Lines, Reply, Wire, World, call_text, world
from support.scripted_engine import Ask, Fault, Parts, check_exact

EVERY = pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.name)
TOOLS = ("bash", "edit", "agent")


async def finished(w: World, *, masked: set[str] = frozenset(), lineages: int = 1) -> SessionReport:  # type: ignore[assignment]
    """Return the report after checking it against the engine's requests."""
    report = await w.finish()
    check_exact(report, w.engines)
    assert set(report.masked) == set(masked)
    assert len(report.lineages) == lineages
    assert report.failures == ()
    return report


def is_one_conversation(w: World) -> bool:
    """Return whether each prompt begins with prompt and output of the previous turn."""
    sampled = w.engines[0].sampled
    return all(
        after.prompt_ids[: len(before.prompt_ids + before.output_ids)] == before.prompt_ids + before.output_ids
        for before, after in pairwise(sampled)
    )


CLAUDE_CODE = "claude-cli/2.1.281 (external, cli)"


# Echoes that are not what was served.

EDIT = {"file_path": "a.py", "old_string": "x", "new_string": "def f():  \n    return 1 \n"}


def call_block(blocks: list[Any]) -> Any:
    return next(block for block in blocks if block["type"] == "tool_use")


def edit_rewritten(blocks: list[Any]) -> list[Any]:
    block = call_block(blocks)
    lines = block["input"]["new_string"].split("\n")
    stripped = "\n".join(line.rstrip() for line in lines)
    block["input"] = {"replace_all": False, "new_string": stripped, "file_path": "a.py", "old_string": "x"}
    return blocks


def folder_dropped(blocks: list[Any]) -> list[Any]:
    call_block(blocks)["input"] = {"timeout": 5000, "command": "ls", "run_in_background": False}
    return blocks


def text_moved(blocks: list[Any]) -> list[Any]:
    return sorted(blocks, key=lambda block: block["type"] == "tool_use")


def blank_dropped(blocks: list[Any]) -> list[Any]:
    return [block for block in blocks if block["type"] != "text" or block["text"].strip()]


def reasoning_dropped(blocks: list[Any]) -> list[Any]:
    return [block for block in blocks if block["type"] != "thinking"]


def not_parsed(blocks: list[Any]) -> list[Any]:
    raw = json.dumps(call_block(blocks)["input"])
    call_block(blocks)["input"] = {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
    return blocks


BASH = {"command": "cd /work && ls", "timeout": "5000", "run_in_background": "false"}
REWRITTEN: dict[str, tuple[str, Callable[[list[Any]], list[Any]]]] = {
    "defaults, order, blanks": (call_text("edit", **EDIT), edit_rewritten),
    "folder, types": (call_text("bash", **BASH), folder_dropped),
    "text after a call": (call_text("bash", **BASH) + "\nI wait.", text_moved),
    "blank text": (" \n" + call_text("bash", **BASH), blank_dropped),
    "no reasoning": ("<think>\nhm\n</think>\n\n" + call_text("bash", **BASH), reasoning_dropped),
    "arguments unread": (call_text("bash", **BASH), not_parsed),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", REWRITTEN)
async def test_no_token_is_lost_when_an_echo_is_rewritten(model_dir: Path, kind: str, stream: bool) -> None:
    said, rewrite = REWRITTEN[kind]
    async with world(model_dir, Lines(said, said, "Done.")) as w:
        client = await w.client(ANTHROPIC, stream=stream, tools=TOOLS)
        client.headers["User-Agent"] = CLAUDE_CODE
        reply = await client.say("mend it")
        for _ in range(2):
            client.history[-1]["content"] = rewrite(copy.deepcopy(client.history[-1]["content"]))
            reply = await client.give((reply.calls[0][0], "output"))
        assert reply.text == "Done."
        assert is_one_conversation(w)
        assert (await finished(w)).rerendered == 0


def arguments_compact(message: dict[str, Any]) -> None:
    function = message["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(json.loads(function["arguments"]), separators=(",", ":"), ensure_ascii=False)


def fields_added(message: dict[str, Any]) -> None:
    message |= {"provider_specific_fields": {"x": None}, "function_call": None, "content": ""}


def reasoning_renamed(message: dict[str, Any]) -> None:
    message["reasoning"] = message.pop("reasoning_content", "other words")


@pytest.mark.parametrize("change", [arguments_compact, fields_added, reasoning_renamed])
async def test_no_token_is_lost_in_echoes_of_other_openai_clients(
    model_dir: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    said = "<think>\nhm\n</think>\n\n" + call_text("bash", command="echo é", n=1)
    async with world(model_dir, Lines(said, said, "Done.")) as w:
        client = await w.client(CHAT, tools=TOOLS)
        reply = await client.say("mend it")
        for _ in range(2):
            change(client.history[-1])
            reply = await client.give((reply.calls[0][0], "output"))
        assert is_one_conversation(w)
        assert (await finished(w)).rerendered == 0


async def test_volatile_request_fields_are_ignored(model_dir: Path) -> None:
    """Cache marks that move, a billing line that counts, ids of items, provider fields."""
    async with world(model_dir, Lines("a", "b", "c")) as w:
        client = await w.client(ANTHROPIC, tools=TOOLS)
        for number in range(3):
            for message in client.history:
                if isinstance(message["content"], list):
                    message["content"][-1].pop("cache_control", None)
            client.history += [{"role": "user", "content": [{"type": "text", "text": f"turn {number}"}]}]
            client.history[-1]["content"][0]["cache_control"] = {"type": "ephemeral"}
            billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number};"}
            system = [billing, {"type": "text", "text": "You repair things."}]
            reply = await client.send(client.body(system=system, metadata={"user_id": str(number)}))
            client.history += ANTHROPIC.echo(reply.kept)
        assert is_one_conversation(w)
        await finished(w)


async def test_changed_item_ids_are_ignored(model_dir: Path) -> None:
    async with world(model_dir, Lines("<think>\nhm\n</think>\n\na", "b", "c")) as w:
        client = await w.client(RESPONSES, tools=TOOLS)
        for number in range(3):
            await client.say(f"turn {number}")
            for position, item in enumerate(client.history):
                item |= {"id": f"rewritten_{number}_{position}", "status": None}
        assert is_one_conversation(w)
        await finished(w)


async def test_system_messages_within_a_conversation_keep_their_position(model_dir: Path) -> None:
    async with world(model_dir, Lines("a", "b", "c")) as w:
        client = await w.client(ANTHROPIC, tools=TOOLS)
        await client.ask({"role": "user", "content": "mend it"}, {"role": "system", "content": "a reminder"})
        await client.ask({"role": "system", "content": "a notice"}, {"role": "user", "content": "on"})
        await client.ask({"role": "user", "content": "and"}, {"role": "system", "content": "another"})
        assert is_one_conversation(w)
        assert "another" in w.engines[0].sampled[-1].prompt
        await finished(w)


async def test_leading_developer_messages_are_joined_into_one_system_message(model_dir: Path) -> None:
    async with world(model_dir, Lines("a", "b")) as w:
        client = await w.client(RESPONSES, system="")
        texts = ("rules", "and more rules")
        client.history += [{"type": "message", "role": "developer", "content": text} for text in texts]
        await client.say("environment")
        await client.say("task")
        assert w.engines[0].sampled[0].prompt.startswith("<|im_start|>system\nrules\n\nand more rules<|im_end|>")
        assert is_one_conversation(w)
        await finished(w)


def stripped(blocks: list[Any]) -> list[Any]:
    return [block for block in blocks if block["type"] != "thinking"]


def summarised(blocks: list[Any]) -> list[Any]:
    return [block | {"thinking": "shorter"} if block["type"] == "thinking" else block for block in blocks]


@pytest.mark.parametrize("change", [list, stripped, summarised], ids=["echoed", "stripped", "summarised"])
async def test_reasoning_tokens_are_kept_whatever_the_client_echoes(
    model_dir: Path, change: Callable[[list[Any]], list[Any]]
) -> None:
    async with world(model_dir, Lines("<think>\nlong thoughts\n</think>\n\nWell.", "Done.")) as w:
        client = await w.client(ANTHROPIC)
        await client.say("go")
        client.history[-1]["content"] = change(client.history[-1]["content"])
        await client.say("on")
        assert is_one_conversation(w)
        assert "long thoughts" in w.engines[0].sampled[1].prompt
        await finished(w)


# Edits under the ids of the calls that were served.


def change_calls(history: list[Any], change: Callable[[str, dict[str, Any]], tuple[str, dict[str, Any]]]) -> None:
    """Change the name and the arguments of each call in a history of any of the APIs; ids stay."""
    for item in history:
        blocks = [item, *(item["content"] if isinstance(item.get("content"), list) else ())]
        for one in [*blocks, *(call["function"] for call in item.get("tool_calls") or ())]:
            if one.get("type") == "tool_use":
                one["name"], one["input"] = change(one["name"], one["input"])
            elif "arguments" in one:
                name, given = change(one["name"], json.loads(one["arguments"]))
                one |= {"name": name, "arguments": json.dumps(given)}


def made_harmless(name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return "edit", {"command": "read calc.py"}


@EVERY
@pytest.mark.parametrize("client_name", ["", CLAUDE_CODE], ids=["unknown program", "known program"])
async def test_the_engine_sees_the_call_that_the_agent_sends(model_dir: Path, wire: Wire, client_name: str) -> None:
    async with world(model_dir, Lines(call_text("bash", command="rm -rf ."), "Done.", "Bye.")) as w:
        client = await w.client(wire, tools=TOOLS)
        client.headers["User-Agent"] = client_name
        reply = await client.say("go")
        change_calls(client.history, made_harmless)
        await client.give((reply.calls[0][0], "the text"))
        await client.say("on")
        for turn in w.engines[0].sampled[1:]:
            assert ("read calc.py" in turn.prompt, "rm -rf" in turn.prompt) == (True, False)
        report = await finished(w, lineages=2)
        assert (report.drift, report.trained_tokens) == ({"edited": 1}, report.sampled_tokens)


def trimmed(name: str, given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return name, {"command": "(trimmed)"}


@EVERY
async def test_an_agent_leaves_a_full_context_by_trimming_an_old_call(model_dir: Path, wire: Wire) -> None:
    long = call_text("bash", command="word " * 400)
    async with world(model_dir, Lines(long, long, "Done.")) as w:
        await (await w.client(wire, tools=TOOLS, session_id="measured")).say("go")
        [measured] = w.engines[0].sampled
        full = len(measured.prompt_ids) + len(measured.output_ids) + 100
        client = await w.client(wire, tools=TOOLS, spec={"budgets": Budgets(max_context_tokens=full)})
        reply = await client.say("go")
        assert reply.calls, "the first turn fits"
        refused = await client.give((reply.calls[0][0], "word " * 150))
        assert refused.status == 400
        change_calls(client.history, trimmed)
        assert (await client.send(client.body())).text == "Done."
        assert w.engines[0].sampled[-1].prompt.count("word") == 150
        w.engines[0].sampled.remove(measured)
        await finished(w, lineages=2)


# Agents that do not send the policy's turns back.


async def play_planner(w: World, wire: Wire, **settings: Any) -> SessionReport:
    """Five calls of a planner that tells the policy in a further user message what it said."""
    client = await w.client(wire, **settings)
    for number in range(5):
        client.history += wire.user(f"step {number}")
        assert (await client.send(client.body())).status == 200
    report = await w.finish()
    assert report.turns == 5
    return report


@EVERY
async def test_turns_that_are_never_sent_back_are_trained_if_asked(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, Lines(*["answer"] * 5 * 8)) as w:
        report = await play_planner(w, wire)
        assert report.trained_tokens * 5 == report.sampled_tokens
        assert set(report.masked) == {"abandoned"}
        trained = (TrainedPart.MAIN, TrainedPart.ABANDONED)
        report = await play_planner(w, wire, spec={"train": trained})
        assert report.trained_tokens == report.sampled_tokens
        for _ in range(6):
            assert (await w.gateway.in_flight()).coverage.alarm == ""
            await play_planner(w, wire)
        alarm = (await w.gateway.in_flight()).coverage.alarm
        assert alarm == "30% of the sampled tokens are trained (abandoned)"


async def test_side_calls_are_trained_if_asked(model_dir: Path) -> None:
    async with world(model_dir, Parts({"title": ["Repairs"], "": ["one", "two"]})) as w:
        spec = {"train": (TrainedPart.MAIN, TrainedPart.SIDE)}
        client = await w.client(ANTHROPIC, tools=TOOLS, spec=spec)
        side = Client(w.http, client.base_url, ANTHROPIC, system="Write a title.")
        await asyncio.gather(side.say("mend it"), client.say("mend it"))
        await client.say("on")
        report = await finished(w, lineages=2)
        assert report.trained_tokens == report.sampled_tokens


# Calls and results.

THREE = "\n".join(call_text("bash", command=str(number)) for number in range(3))


def in_order(ids: list[str]) -> list[str]:
    return ids


def reordered(ids: list[str]) -> list[str]:
    return ids[::-1]


def doubled(ids: list[str]) -> list[str]:
    return [*ids, ids[0]]


@EVERY
@pytest.mark.parametrize("change", [in_order, reordered, doubled])
async def test_parallel_calls_keep_their_order_and_ids_whatever_the_order_of_their_results(
    model_dir: Path, wire: Wire, change: Callable[[list[str]], list[str]]
) -> None:
    async with world(model_dir, Lines(THREE, "Done.", "Bye.")) as w:
        client = await w.client(wire, tools=TOOLS)
        reply = await client.say("go")
        assert [given["command"] for _, _, given in reply.calls] == ["0", "1", "2"]
        ids = [call_id for call_id, _, _ in reply.calls]
        assert len(set(ids)) == 3
        await client.give(*((call_id, f"output {call_id}") for call_id in change(ids)))
        await client.say("on")
        assert is_one_conversation(w)
        prompt = w.engines[0].sampled[1].prompt
        places = [prompt.find(f"output {call_id}") for call_id in ids]
        assert places == sorted(places)
        assert all(prompt.count(f"output {call_id}") == 1 for call_id in ids)
        assert prompt.count("<|im_start|>user") == 2, "all results stand in one boundary"
        await finished(w)


@EVERY
@pytest.mark.parametrize("dropped", [0, 1, 2])
async def test_a_dropped_result_is_not_in_the_prompt(model_dir: Path, wire: Wire, dropped: int) -> None:
    async with world(model_dir, Lines(THREE, "Done.", "Bye.")) as w:
        client = await w.client(wire, tools=TOOLS)
        ids = [call_id for call_id, _, _ in (await client.say("go")).calls]
        before = len(client.history)
        given = [(ids[0], "north"), (ids[1], "east"), (ids[2], "south")]
        await client.give(*given)
        # A later request has left one out: pruned to save context.
        left = [pair for index, pair in enumerate(given) if index != dropped]
        client.history[before : before + len(wire.results(*given))] = wire.results(*left)
        await client.say("on")
        prompt = w.engines[0].sampled[2].prompt
        shown = [text for text in ("north", "east", "south") if text in prompt]
        assert shown == [text for _, text in left]
        await finished(w, lineages=2)


async def test_parallel_calls_echoed_as_several_messages_are_matched_as_one_turn(model_dir: Path) -> None:
    async with world(model_dir, Lines(THREE, "Done.")) as w:
        client = await w.client(CHAT, tools=TOOLS)
        reply = await client.say("go")
        message = client.history.pop()
        for call in message["tool_calls"]:
            client.history += [message | {"tool_calls": [call]}, *CHAT.results((call["id"], "output"))]
        await client.say("on")
        assert reply.calls
        assert is_one_conversation(w)
        await finished(w)


# Several conversations.


async def test_subagents_have_their_own_lineages(model_dir: Path) -> None:
    """A parent starts two subagents that run concurrently, and continues afterwards."""
    script = Parts(
        {
            "You explore A": [call_text("bash", command="A"), "A is so."],
            "You explore B": [call_text("bash", command="B"), "B is so."],
            "": ["\n".join(call_text("agent", task=name) for name in "AB"), "Both are so."],
        }
    )
    async with world(model_dir, script) as w:
        parent = await w.client(ANTHROPIC, tools=TOOLS)
        reply = await parent.say("explore")

        async def explore(name: str) -> str:
            headers = {"x-claude-code-agent-id": f"agent-{name}"}
            system = f"You explore {name}."
            child = Client(w.http, parent.base_url, ANTHROPIC, tools=("bash",), system=system, headers=headers)
            first = await child.say(f"look at {name}")
            return (await child.give((first.calls[0][0], "out"))).text

        found = await asyncio.gather(explore("A"), explore("B"))
        await parent.give(*((call_id, text) for (call_id, _, _), text in zip(reply.calls, found, strict=True)))
        report = await finished(w, lineages=3)
        assert report.turns == 6
        assert report.trained_tokens == report.sampled_tokens
        names = [lineage.name for lineage in report.lineages]
        assert sorted(name.partition(".")[2] for name in names) == ["", "agent-A", "agent-B"]


async def test_a_side_call_is_masked_out_of_training(model_dir: Path) -> None:
    """The side call requests a title for the session during the first turn, without tools."""
    async with world(model_dir, Parts({"title": ["Repairs"], "": ["one", "two"]})) as w:
        client = await w.client(ANTHROPIC, tools=TOOLS)
        side = Client(w.http, client.base_url, ANTHROPIC, system="Write a title.")
        await asyncio.gather(side.say("mend it"), client.say("mend it"))
        await client.say("on")
        await finished(w, masked={"side"})


async def test_a_compaction_continues_on_a_new_root_and_is_trained(model_dir: Path) -> None:
    """As Claude Code does it: the last pair is removed, the order to summarise stands inside the last user message;
    then comes the summary, and the kept tail."""
    look, again = call_text("bash", command="look"), call_text("bash", command="again")
    script = Parts({"CRITICAL": ["Summary: all is well."], "Summary: all": ["Done."], "": [look, again]})
    async with world(model_dir, script) as w:
        client = await w.client(ANTHROPIC, tools=TOOLS)
        first = await client.say("mend it")
        second = await client.give((first.calls[0][0], "out 1"))
        client.history += ANTHROPIC.results((second.calls[0][0], "out 2"))
        tail = client.history[-2:]
        # The request that did not fit is not seen by any engine.
        asked = copy.deepcopy(client.history[:-2])
        asked[-1]["content"].append({"type": "text", "text": "CRITICAL: Respond with TEXT ONLY. Summarise."})
        summary = await client.send(client.body(messages=asked))
        assert summary.text == "Summary: all is well."
        client.history = [*ANTHROPIC.user(summary.text), *tail]
        assert (await client.say("go on")).text == "Done."
        report = await finished(w, lineages=3)
        assert (report.turns, report.trained_tokens) == (4, report.sampled_tokens)


async def test_a_lineage_records_a_reported_compaction(model_dir: Path) -> None:
    """As Codex does it: no tools, another user item, and a word in its metadata."""
    script = Parts({"CHECKPOINT": ["Summary: fine."], "Summary: fine": ["Done."], "": ["one", "two"]})
    async with world(model_dir, script) as w:
        client = await w.client(RESPONSES, tools=TOOLS)
        await client.say("mend it")
        await client.say("on")
        compact = Client(w.http, client.base_url, RESPONSES, history=list(client.history))
        compact.headers = {"x-codex-turn-metadata": '{"request_kind": "compaction"}'}
        summary = await compact.say("CONTEXT CHECKPOINT COMPACTION")
        client.history = [*RESPONSES.user("mend it"), *RESPONSES.user(summary.text)]
        await client.say("go on")
        report = await finished(w, lineages=3)
        assert any(lineage.name.endswith("compaction") for lineage in report.lineages)


async def test_a_summary_request_without_tools_that_quotes_our_turns_is_not_a_side_call(model_dir: Path) -> None:
    async with world(model_dir, Parts({"Summarise": ["All is well."], "": ["one", "two"]})) as w:
        client = await w.client(CHAT, tools=TOOLS)
        await client.say("mend it")
        await client.say("on")
        summing_up = Client(w.http, client.base_url, CHAT, system="You sum up.", history=list(client.history))
        await summing_up.say("Summarise.")
        report = await finished(w, lineages=2)
        assert report.trained_tokens == report.sampled_tokens


@EVERY
async def test_changed_tools_begin_a_new_row(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, Lines("a", "b")) as w:
        client = await w.client(wire, tools=("bash",))
        await client.say("go")
        client.tools = ("bash", "edit")
        await client.say("on")
        report = await finished(w, lineages=2)
        assert report.rerendered == 1


# Turns that agents drop.


@EVERY
async def test_a_turn_that_the_agent_dropped_is_abandoned_and_masked(model_dir: Path, wire: Wire) -> None:
    """The turn has no visible output, so that the agent drops its message and continues from before it."""
    look = call_text("bash", command="look")
    async with world(model_dir, Lines(look, "<think>\nhm\n</think>\n\n", "Done.", "Bye.")) as w:
        client = await w.client(wire, tools=TOOLS)
        first = await client.say("go")
        await client.give((first.calls[0][0], "out"))
        del client.history[-len(wire.echo(client.history[-1:] if wire is RESPONSES else None)) :]
        await client.say("There was no visible output.")
        await client.say("on")
        report = await finished(w, masked={"abandoned"})
        assert report.masked["abandoned"] == len(w.engines[0].sampled[1].output_ids)


async def test_a_nudge_added_to_the_last_message_branches_after_the_tool_result(model_dir: Path) -> None:
    """As Claude Code does it after an empty answer."""
    look = call_text("bash", command="look")
    async with world(model_dir, Lines(look, "", "Done.")) as w:
        client = await w.client(ANTHROPIC, tools=TOOLS)
        first = await client.say("go")
        await client.give((first.calls[0][0], "out"))
        client.history.pop()
        client.history[-1]["content"].append({"type": "text", "text": "No visible output. Continue."})
        await client.send(client.body())
        report = await finished(w, masked={"abandoned"})
        assert report.rerendered == 0


async def test_a_dropped_malformed_turn_is_never_merged(model_dir: Path) -> None:
    """As mini-swe-agent does it: only an error of the user is appended."""
    async with world(model_dir, Lines("no call at all", call_text("bash", command="ls"), "Done.")) as w:
        client = await w.client(CHAT, tools=TOOLS)
        await client.say("go")
        client.history.pop()
        reply = await client.say("There was no call in your answer.")
        await client.give((reply.calls[0][0], "out"))
        report = await finished(w, masked={"abandoned"})
        assert "no call at all" not in w.engines[0].sampled[-1].prompt
        assert report.turns == 3


async def test_a_fabricated_assistant_turn_is_never_trained(model_dir: Path) -> None:
    async with world(model_dir, Lines("a", "b")) as w:
        client = await w.client(CHAT)
        client.history += [*CHAT.user("context"), {"role": "assistant", "content": "Got it. Thanks for the context!"}]
        await client.say("task")
        await client.say("on")
        await finished(w)


@EVERY
async def test_an_edited_history_is_a_separate_row(model_dir: Path, wire: Wire) -> None:
    async with world(model_dir, Lines("a", "b", "c")) as w:
        client = await w.client(wire)
        await client.say("one")
        await client.say("two")
        client.history[0] = wire.user("another one")[0]
        await client.say("three")
        report = await finished(w, lineages=2)
        assert report.rerendered == 1


async def test_a_rewind_is_a_branch_with_a_shared_prefix(model_dir: Path) -> None:
    async with world(model_dir, Lines("a", "b", "c", "d")) as w:
        client = await w.client(CHAT)
        await client.say("one")
        beginning = list(client.history)
        await client.say("two")
        await client.say("three")
        client.history = beginning
        await client.say("another two")
        report = await finished(w, lineages=2)
        assert (report.rerendered, report.trained_tokens) == (0, report.sampled_tokens)


async def test_the_tree_reports_the_status_of_every_turn(model_dir: Path) -> None:
    def script(ask: Ask) -> str | Fault:
        return Fault.HANG if "hang" in ask.prompt else f"answer {ask.number}"

    async with world(model_dir, script) as w:
        client = await w.client(CHAT, tools=TOOLS)
        await client.say("one")
        dropped: Reply = await client.say("two")
        client.history[-2:] = []
        await client.say("two, otherwise")
        leaving = asyncio.ensure_future(client.send(client.body(messages=CHAT.user("hang"))))
        async with asyncio.timeout(20):
            while len(w.engines[0].requests) < 4:
                w.engines[0].asked.clear()
                await w.engines[0].asked.wait()
        leaving.cancel()
        await asyncio.wait([leaving])
        status, document = await w.post("/sessions/rollout-1/finish", {"tree": True})
        assert (status, dropped.status) == (200, 200)
        shown = [(turn["status"], turn["masked"]) for turn in document["tree"]]
        assert shown == [
            ("accepted", None),
            ("delivered", "abandoned"),
            ("delivered", None),
            ("aborted", "aborted"),
        ]
        parents = [turn["parent"] for turn in document["tree"]]
        first = document["tree"][0]["turn_id"]
        assert parents == [None, first, first, None]
