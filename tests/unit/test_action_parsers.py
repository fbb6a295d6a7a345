"""Each parser reads actions by its published rules, and never changes the policy's words."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.actors.agents.loop.action_parsers import PARSERS, Malformed, ParserKind
from headrace.actors.environments.environment import Action
from headrace.actors.services.chat import ChatCall, ChatReply


def parsed(kind: ParserKind, text: str, *calls: ChatCall) -> Action | Malformed:
    return PARSERS[kind].parse(ChatReply(text=text, finish_reason="stop", calls=calls))


@pytest.mark.parametrize(
    ("kind", "text", "name", "arguments"),
    [
        (ParserKind.LINE, " ls -l ", "run", {"command": " ls -l "}),
        (ParserKind.FENCE, "First:\n```bash\nls\ncat a\n```\n```bash\nrm b\n```", "run", {"command": "ls\ncat a"}),
        (ParserKind.TAGS, "<command>ls</command> no, <command>pwd</command>", "run", {"command": "pwd"}),
        (ParserKind.TAGS, "<command>ls</command><action>done</action>", "done", {}),
        (ParserKind.TAGS, "<action> done </action><command>ls</command>", "done", {}),
        (ParserKind.TAGS, "<command>done</command>", "done", {}),
        (ParserKind.TAGS, "<command>\ncat <<E\nx\nE\n</command>", "run", {"command": "cat <<E\nx\nE"}),
        (ParserKind.SEARCH, "<think>a</think><search> who? </search>", "search", {"query": "who?"}),
        (ParserKind.SEARCH, "<search>a</search><answer>b</answer>", "search", {"query": "a"}),
        (ParserKind.SEARCH, "<answer>b</answer>", "answer", {"text": "b"}),
        (ParserKind.SEARCH, "<answer>x<search>q</search>", "search", {"query": "q"}),
        (ParserKind.CALLS, "How can I help?", "respond", {"content": "How can I help?"}),
    ],
)
def test_actions_are_read_from_text(kind: ParserKind, text: str, name: str, arguments: dict[str, Any]) -> None:
    action = parsed(kind, text)
    assert isinstance(action, Action)
    assert (action.name, action.arguments) == (name, arguments)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *[(ParserKind.LINE, text) for text in ("", "  ", "a\nb", "a\0b")],
        *[(ParserKind.FENCE, text) for text in ("ls", "```\nls\n```", "```bash\n```", "```bash\nls")],
        *[(ParserKind.TAGS, text) for text in ("ls", "<command>ls", "<command> </command>", "<action>stop</action>")],
        *[(ParserKind.SEARCH, text) for text in ("who?", "<search>who", "<answer>b</search>")],
        (ParserKind.CALLS, " \n"),
    ],
)
def test_an_answer_without_an_action_is_malformed(kind: ParserKind, text: str) -> None:
    assert isinstance(parsed(kind, text), Malformed)


def test_only_the_first_call_is_an_action() -> None:
    calls = [ChatCall(id=f"c{n}", name=f"tool{n}", arguments='{"a": [1, {"b": null}]}') for n in range(2)]
    remarks = ("only the first of 2 calls is run",)
    action = Action(name="tool0", arguments={"a": [1, {"b": None}]}, remarks=remarks)
    assert parsed(ParserKind.CALLS, "text beside", *calls) == action


@pytest.mark.parametrize(
    ("kind", "text", "remarks"),
    [
        (ParserKind.FENCE, "```bash\nls\n```\n```bash\nrm b\n```", ("only the first of 2 code blocks is run",)),
        (ParserKind.TAGS, "<command>ls</command><command>pwd</command>", ("only the last of 2 commands is run",)),
        (ParserKind.FENCE, "```bash\nls\n```", ()),
        (ParserKind.TAGS, "<command>ls</command>", ()),
        (ParserKind.TAGS, "<command>ls</command><command>done</command>", ()),
    ],
)
def test_an_answer_with_more_than_one_action_is_remarked_on(
    kind: ParserKind, text: str, remarks: tuple[str, ...]
) -> None:
    action = parsed(kind, text)
    assert isinstance(action, Action)
    assert action.remarks == remarks


@pytest.mark.parametrize("arguments", ["{", "[1]", '"a"', "NaN x"])
def test_calls_with_other_arguments_than_an_object_are_malformed(arguments: str) -> None:
    assert isinstance(parsed(ParserKind.CALLS, "", ChatCall(id="c", name="t", arguments=arguments)), Malformed)


def test_a_parser_lists_all_actions_that_it_can_produce() -> None:
    texts = (
        "ls",
        "```bash\nls\n```",
        "<command>ls</command>",
        "<action>done</action>",
        "<search>a</search>",
        "<answer>a</answer>",
    )
    for kind, parser in PARSERS.items():
        if parser.actions is not None:
            found = {action.name for text in texts if isinstance(action := parsed(kind, text), Action)}
            assert found == parser.actions
