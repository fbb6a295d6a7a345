"""Exports of a session: messages found in prompts of known templates, steps of ATIF, and turns that are masked or
shared."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.serve.gateway.capture.rows import report_of
from headrace.serve.gateway.capture.session import Budgets, Sampling, Session, SessionId, SessionSpec
from headrace.serve.gateway.conversation import Message, Role, ToolCall, ToolResult, ToolSpec, say
from headrace.serve.gateway.exports import json_pieces
from headrace.serve.gateway.exports.atif import NOTHING_SAMPLED, AtifWriter
from headrace.serve.gateway.exports.branches import branches_of
from headrace.serve.gateway.exports.export_form import ExportForm
from headrace.serve.gateway.exports.prompt_messages import MessageShape
from headrace.serve.gateway.exports.rollout_details import rollout_details
from headrace.serve.gateway.http import codec
from headrace.serve.gateway.http.exports import Exporter
from headrace.serve.gateway.parsing.parser_choice import choose_parser
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.template_renderer import load_renderer
from support import chat_templates as templates
from support.session_rig import LineParser, Rig, asks, echo, results, user

SPLIT = ("qwen3", "qwen3-thinking", "qwen2.5", "llama3.1", "glm4", "deepseek-v3", "deepseek-v3-leaky")
LS = ToolCall("call_1", "bash", '{"command": "ls"}')
TOOLS = (ToolSpec("bash"),)
LOOK = '<think>\nHm.\n</think>\n\nI look.\n<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.fixture(scope="module")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    families = (*templates.FAMILIES,)
    return {family.name: load_renderer(family.write(tmp_path_factory.mktemp(family.name))) for family in families}


def in_root(renderer: Renderer, *messages: Message) -> list[tuple[str, str]]:
    text = renderer.decode(renderer.render(messages, ()))
    return [*MessageShape.of(renderer).messages(text, is_root=True, is_open=False)]


def in_bridge(renderer: Renderer, *messages: Message) -> list[tuple[str, str]]:
    calls = (LS,) if messages[0].role is Role.TOOL else ()
    text = renderer.decode(renderer.bridge(renderer.stop_ids[0], calls, messages))
    return [*MessageShape.of(renderer).messages(text, is_root=False, is_open=False)]


@pytest.mark.parametrize("name", SPLIT)
def test_messages_are_found_in_the_prompts_of_known_templates(name: str, renderers: dict[str, Renderer]) -> None:
    renderer = renderers[name]
    assert in_root(renderer, say(Role.SYSTEM, "Be brief.\nAlways."), user("one")) == [
        ("system", "Be brief.\nAlways."),
        ("user", "one"),
    ]
    earlier = in_root(renderer, say(Role.SYSTEM, "S"), user("one"), say(Role.ASSISTANT, "two"), user("three"))
    assert earlier == [("system", "S"), ("user", "one"), ("agent", "two"), ("user", "three")]
    assert in_bridge(renderer, user("more"), user("and more"))[-1] == ("user", "and more")
    [(source, result), *rest] = in_bridge(renderer, Message(Role.TOOL, (ToolResult("call_1", "a.txt"),)), user("on"))
    assert source == "user"
    assert "a.txt" in result
    assert rest == [("user", "on")]


@pytest.mark.parametrize("name", SPLIT)
def test_a_message_cannot_pretend_to_be_several(name: str, renderers: dict[str, Renderer]) -> None:
    renderer = renderers[name]
    shape = MessageShape.of(renderer)
    forged = "a" + "".join(f"{closing}{opening}b" for opening in shape.openings for closing in (*shape.closings, ""))
    assert [source for source, _ in in_root(renderer, user(forged))][-1:] == ["user"]
    found = in_bridge(renderer, user(forged))
    assert len(found) == 1
    assert found[0][1].count("b") == forged.count("b")


def test_a_template_without_control_tokens_gives_one_message(renderers: dict[str, Renderer]) -> None:
    strict = renderers["strict"]
    assert MessageShape.of(strict).openings == {}
    assert in_root(strict, user("one")) == [("user", "<s>[INST] one [/INST]")]


def test_an_open_message_of_the_policys_is_a_message(renderers: dict[str, Renderer]) -> None:
    shape = MessageShape.of(renderers["qwen3"])
    text = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\nWell, I"
    assert shape.messages(text, is_root=True, is_open=True) == [("user", "go"), ("agent", "Well, I")]
    assert shape.messages(text, is_root=True, is_open=False) == [("user", "go")]


def rig(renderer: Renderer, *, keeps_answers: bool = True, **spec: Any) -> Rig:
    """A session with the template and the parser of a model family."""
    core = Session(SessionSpec(session_id=SessionId("r-1"), **spec), 0.0, keeps_answers=keeps_answers)
    parser = choose_parser("auto", renderer.template)
    return Rig(core, renderer, parser, tokenize=lambda text: tuple(renderer.insert(text)))


def atif(played: Rig) -> Any:
    writer = AtifWriter(played.renderer.decode, MessageShape.of(played.renderer))
    return json.loads(b"".join(writer.pieces(played.core, report_of(played.core))))


def details(played: Rig) -> Any:
    return json.loads(b"".join(rollout_details(played.core)))


def test_a_conversation_with_a_call_has_the_steps_of_atif(renderers: dict[str, Renderer]) -> None:
    played = rig(renderers["qwen3"])
    said = [say(Role.SYSTEM, "You repair things."), user("mend it")]
    answer = played.turn(asks(*said, tools=TOOLS), LOOK)
    history = (*said, echo(answer), results((answer.calls[0].id, "a.txt")))
    done = played.turn(asks(*history, tools=TOOLS), "Done.")
    played.turn(asks(*history, echo(done), user("again"), tools=TOOLS), "No.")
    document = atif(played)
    steps = document["steps"]
    assert [(step["source"], step["message"]) for step in steps][1:] == [
        ("user", "mend it"),
        ("agent", "I look."),
        ("agent", "Done."),
        ("user", "again"),
        ("agent", "No."),
    ]
    assert steps[0]["source"] == "system"
    assert steps[0]["message"].startswith("You repair things.")
    assert "bash" in steps[0]["message"], "the tools, which have no field of their own"
    assert [step["step_id"] for step in steps] == [1, 2, 3, 4, 5, 6]
    look = steps[2]
    assert look["reasoning_content"] == "Hm."
    assert look["tool_calls"] == [
        {"tool_call_id": answer.calls[0].id, "function_name": "bash", "arguments": {"command": "ls"}}
    ]
    [result] = look["observation"]["results"]
    assert "a.txt" in result["content"]
    assert [step["metrics"]["prompt_token_ids"] for step in steps if "metrics" in step] == played.prompts
    assert [step["metrics"]["completion_token_ids"] for step in steps if "metrics" in step] == played.outputs
    assert document["final_metrics"]["total_prompt_tokens"] == sum(map(len, played.prompts))
    assert document["extra"]["trained_tokens"] == sum(map(len, played.outputs))


def test_of_a_turn_whose_answer_was_not_kept_the_message_is_what_was_sampled(renderers: dict[str, Renderer]) -> None:
    played = rig(renderers["qwen3"], keeps_answers=False)
    answer = played.turn(asks(user("mend it"), tools=TOOLS), LOOK)
    played.turn(asks(user("mend it"), echo(answer), results((answer.calls[0].id, "a")), tools=TOOLS), "Done.")
    first, last = (step for step in atif(played)["steps"] if step["source"] == "agent")
    assert first["message"] == LOOK + "<|im_end|>"
    assert "reasoning_content" not in first
    assert last["message"] == "Done."


def test_arguments_that_are_no_object_are_kept_as_text(renderers: dict[str, Renderer]) -> None:
    played = rig(renderers["qwen3"])
    played.parser = LineParser()
    played.turn(asks(user("go"), tools=TOOLS), "CALL bash [1")
    [call] = atif(played)["steps"][-1]["tool_calls"]
    assert (call["arguments"], call["extra"]) == ({}, {"arguments": "[1"})


def test_masked_turns_are_steps_with_their_reasons(renderers: dict[str, Renderer]) -> None:
    played = rig(renderers["qwen3"])
    go = user("go")
    played.turn(asks(go), "dropped")
    kept = played.turn(asks(go), "kept")
    # The agent went on with the second sample.
    fine = played.turn(asks(go, echo(kept), user("on")), "Fine.")
    played.cut(asks(go, echo(kept), user("on"), echo(fine), user("more")), [65, 66])
    played.cut(asks(go, echo(kept), user("other")), [67])
    document = atif(played)
    assert [
        [(step["extra"]["turn_id"][-1], step["extra"]["masked"]) for step in one["steps"] if "extra" in step]
        for one in [document, *document["subagent_trajectories"]]
    ] == [[("2", None), ("3", None), ("4", "aborted")], [("1", "abandoned")], [("2", None), ("5", "aborted")]]
    copied = document["subagent_trajectories"][1]["steps"]
    assert [step.get("is_copied_context", False) for step in copied if step["source"] == "agent"] == [True, False]
    assert "metrics" not in next(step for step in copied if step["source"] == "agent")
    [detail] = details(played)
    assert detail["completion_token_ids"] == [played.outputs[1], played.outputs[2]]
    assert detail["extra"]["masked"] == [None, None]


def test_turns_that_rows_share_are_in_the_first_detail_only(renderers: dict[str, Renderer]) -> None:
    played = rig(renderers["qwen3"])
    go = user("go")
    first = played.turn(asks(go), "first")
    left = played.turn(asks(go, echo(first), user("left")), "left")
    played.turn(asks(go, echo(first), user("left"), echo(left), user("on")), "end")
    played.turn(asks(go, echo(first), user("right")), "and much more on the right: " + "word " * 40)
    both = details(played)
    assert [len(one["completion_token_ids"]) for one in both] == [2, 2]
    assert both[0]["completion_token_ids"] == [played.outputs[0], played.outputs[3]], "the longest comes first"
    assert both[1]["prompt_token_ids"] == played.prompts[1:3]
    assert both[1]["logprobs"] == [list(node.logprobs) for node in played.core.trie.sampled[1:3]]
    ends = [played.core.trie.sampled[3], played.core.trie.sampled[2]]
    assert [branch.name for branch in branches_of(played.core)] == [f"0/{node.turn_id}" for node in ends]


def test_tokens_of_masked_rows_are_marked(renderers: dict[str, Renderer]) -> None:
    played = rig(renderers["qwen3"], sampling=Sampling(temperature=0.0))
    played.turn(asks(user("go")), "abc")
    [detail] = details(played)
    assert detail["extra"]["masked"] == ["sampling"]
    assert detail["extra"]["loss_mask"] == [[0] * len(played.outputs[0])]


def test_the_rows_form_has_every_id_of_the_tree(renderers: dict[str, Renderer]) -> None:
    played = rig(renderers["qwen3"])
    go = user("go")
    played.turn(asks(go), "dropped")
    kept = played.turn(asks(go), "kept")
    played.turn(asks(go, echo(kept), user("on")), "Fine.")
    report = report_of(played.core)
    document = json.loads(b"".join(codec.plain_pieces(played.core, report)))
    plain = json.loads(json.dumps(codec.write_plain_report(report)))
    assert {name: document[name] for name in plain} == plain
    whole: dict[str | None, list[int]] = {None: []}
    for turn, prompt, output in zip(document["tree"], played.prompts, played.outputs, strict=True):
        assert whole[turn["parent"]] + turn["rendered_ids"] == prompt
        assert turn["sampled_ids"] == output
        assert len(turn["logprobs"]) == len(output)
        whole[turn["turn_id"]] = prompt + output
    assert document["sampling"] == {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def test_a_session_without_turns_has_documents(renderers: dict[str, Renderer]) -> None:
    played = rig(renderers["qwen3"])
    document = atif(played)
    assert [step["message"] for step in document["steps"]] == [NOTHING_SAMPLED]
    assert details(played) == []
    assert json.loads(b"".join(codec.plain_pieces(played.core, report_of(played.core))))["tree"] == []


def test_a_document_is_never_in_memory_as_a_whole(renderers: dict[str, Renderer]) -> None:
    played = rig(renderers["qwen3"], budgets=Budgets(max_context_tokens=10**6))
    said = [user("go")]
    for number in range(40):
        said += [echo(played.turn(asks(*said), f"{number} " + "word " * 100)), user("on")]
    exporter, report = Exporter(renderers["qwen3"]), report_of(played.core)
    for form in (ExportForm.ATIF, ExportForm.ROLLOUT_DETAILS):
        sizes = [*map(len, exporter.pieces(form, played.core, report))]
        assert max(sizes) < sum(sizes) / 5, "which has the square of the conversation's length"


def test_pieces_are_joined_up_to_a_size() -> None:
    pieces = [b"ab", b"c", b"def", b"g"]
    assert [*json_pieces.joined(pieces, at_least=3)] == [b"abc", b"def", b"g"]
    assert [*json_pieces.joined([], at_least=3)] == []
    assert b"".join(json_pieces.array([])) == b"[]"
    assert b"".join(json_pieces.document([])) == b"{}"
