"""Renderer with the chat templates of well-known families, compared with transformers and case by case."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from headrace.policies.errors import TemplateRefused
from headrace.policies.tokens.chat_template import Ending
from headrace.policies.tokens.pieces import PieceEncoder
from headrace.policies.tokens.token_bytes import TokenBytes
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.gateway.capture.rows import report_of
from headrace.serve.gateway.capture.session import Session, SessionId, SessionSpec
from headrace.serve.gateway.conversation import Message, Reasoning, Role, Text, ToolCall, ToolResult, ToolSpec, say
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.template_renderer import TemplateRenderer, load_renderer
from support import chat_templates as templates
from support.session_rig import Rig, asks

NAMES = ("qwen3", "qwen3-thinking", "qwen2.5", "llama3.1", "glm4", "deepseek-v3", "deepseek-v3-leaky", "strict")
WITH_TOOLS = NAMES[:-1]
BASH = ToolSpec("bash", "Run <a> command & wait", {"type": "object", "properties": {"command": {"type": "string"}}})
EDIT = ToolSpec("edit", "Änder eine Datei", {"type": "object", "properties": {"lines": {"type": "array"}}})
LS = ToolCall("call_1", "bash", '{"command": "ls \\"a b\\""}')
CAT = ToolCall("call_2", "edit", '{"lines": [1, 2.5, null], "to": {"é": true}}')
OUT, MORE = ToolResult("call_1", "calc.py\ntest.py\n"), ToolResult("call_2", "")
ASKED, DONE = say(Role.USER, "Repair calc.py."), Message(Role.TOOL, (OUT,))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family.name: family.write(tmp_path_factory.mktemp(family.name)) for family in templates.FAMILIES}


@pytest.fixture(scope="module")
def renderers(folders: dict[str, Path]) -> dict[str, Renderer]:
    return {name: load_renderer(folder) for name, folder in folders.items()}


def bridged(renderer: Renderer, last: str, calls: list[ToolCall], *messages: Message) -> str:
    ids = {renderer.decode([stop]): stop for stop in renderer.stop_ids}
    return renderer.decode(renderer.bridge(ids.get(last, 0), calls, messages))


def conversation(name: str) -> list[Message]:
    """Return a conversation with everything that the family's template supports."""
    if name == "strict":
        return [ASKED, templates.said("I look."), say(Role.USER, "  Well?\n")]
    calls = (LS,) if name == "llama3.1" else (LS, CAT)
    results = (OUT,) if name == "llama3.1" else (OUT, MORE)
    return [
        say(Role.SYSTEM, "Be brief.\n"),
        ASKED,
        Message(Role.ASSISTANT, (Reasoning("hm"), Text("I look."), *calls)),
        Message(Role.TOOL, results),
        Message(Role.ASSISTANT, (Reasoning("so\n\n"), Text("A <think>try</think> at it: "))),
        say(Role.USER, "And now?"),
        Message(Role.ASSISTANT, (Reasoning("aha"), *calls[:1])),
        Message(Role.TOOL, results[:1]),
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("with_tools", [False, True])
def test_rendered_ids_match_transformers(
    folders: dict[str, Path], renderers: dict[str, Renderer], name: str, with_tools: bool
) -> None:
    if with_tools and name not in WITH_TOOLS:
        return
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folders[name])
    tools = [BASH, EDIT] if with_tools else []
    shown = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in tools
    ]
    messages = conversation(name)
    for length in range(1, len(messages) + 1):
        if messages[length - 1].role is Role.SYSTEM:
            continue
        part = messages[:length]
        expected = theirs.apply_chat_template(
            templates.as_dicts(part), tools=shown or None, add_generation_prompt=True
        )["input_ids"]
        assert renderers[name].render(part, tools).tolist() == expected


IM_NEXT = "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
IM_RESULTS = "\n<|im_start|>user\n<tool_response>\ncalc.py\ntest.py\n\n</tool_response>"
EOT = "<|start_header_id|>assistant<|end_header_id|>\n\n"
IPYTHON = "<|start_header_id|>ipython<|end_header_id|>\n\n"
GLM_RESULT = "\n<tool_response>\ncalc.py\ntest.py\n\n</tool_response>"
DS_RESULT = "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>calc.py\ntest.py\n<｜tool▁output▁end｜>"  # noqa: RUF001
BRIDGES = {
    "qwen3": (
        ("<|im_end|>", f"\n{IM_NEXT}"),
        (
            "<|im_end|>",
            f"{IM_RESULTS}\n<tool_response>\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        f"<|im_end|>\n{IM_NEXT}",
    ),
    "qwen3-thinking": (
        ("<|endoftext|>", f"\n{IM_NEXT}<think>\n"),
        (
            "<|im_end|>",
            f"{IM_RESULTS}\n<tool_response>\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        f"<|im_end|>\n{IM_NEXT}<think>\n",
    ),
    "qwen2.5": (
        ("<|im_end|>", f"\n{IM_NEXT}"),
        (
            "<|im_end|>",
            f"{IM_RESULTS}\n<tool_response>\n\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        f"<|im_end|>\n{IM_NEXT}",
    ),
    "llama3.1": (
        ("<|eot_id|>", f"<|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>{EOT}"),
        (
            "<|eom_id|>",
            f'{IPYTHON}"calc.py\\ntest.py\\n"<|eot_id|>{IPYTHON}""<|eot_id|>{EOT}',
        ),
        f"<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nAnd now?<|eot_id|>{EOT}",
    ),
    "glm4": (
        ("<|user|>", "\nAnd now?<|assistant|>"),
        ("<|observation|>", f"{GLM_RESULT}\n<tool_response>\n\n</tool_response><|assistant|>"),
        "<|user|>\nAnd now?<|assistant|>",
    ),
    "deepseek-v3": (
        ("<｜end▁of▁sentence｜>", "<｜User｜>And now?<｜Assistant｜>"),  # noqa: RUF001
        (
            "<｜end▁of▁sentence｜>",  # noqa: RUF001
            f"{DS_RESULT}\n<｜tool▁output▁begin｜><｜tool▁output▁end｜><｜tool▁outputs▁end｜>",  # noqa: RUF001
        ),
        "<｜end▁of▁sentence｜><｜User｜>And now?<｜Assistant｜>",  # noqa: RUF001
    ),
}


@pytest.mark.parametrize("name", BRIDGES)
def test_bridges_close_the_turn_once_and_render_the_new_messages(renderers: dict[str, Renderer], name: str) -> None:
    """After a turn that ended, after one with two calls, and after one that was cut."""
    said, called, cut = BRIDGES[name]
    renderer = renderers[name]
    assert renderer.bridges
    assert bridged(renderer, said[0], [], say(Role.USER, "And now?")) == said[1]
    assert bridged(renderer, called[0], [LS, CAT], Message(Role.TOOL, (OUT, MORE))) == called[1]
    assert bridged(renderer, "", [], say(Role.USER, "And now?")) == cut


def test_a_role_token_that_ended_the_turn_is_not_repeated_before_the_same_role(
    renderers: dict[str, Renderer],
) -> None:
    glm = renderers["glm4"]
    assert bridged(glm, "<|observation|>", [LS], DONE).startswith("\n<tool_response>")
    assert bridged(glm, "<|observation|>", [], ASKED).startswith("<|user|>\n")
    assert bridged(glm, "<|endoftext|>", [LS], DONE).startswith("<|observation|>\n")


def test_results_for_unparsed_calls_are_rendered(renderers: dict[str, Renderer]) -> None:
    for name in WITH_TOOLS:
        renderer = renderers[name]
        if renderer.bridges:
            assert bridged(renderer, "", [], DONE) == bridged(renderer, "", [LS], DONE)


def test_a_template_whose_results_depend_on_earlier_ones_does_not_bridge(renderers: dict[str, Renderer]) -> None:
    assert not renderers["deepseek-v3-leaky"].bridges


def test_opens_reasoning_is_set_only_for_prompts_that_open_it(renderers: dict[str, Renderer]) -> None:
    assert [name for name in NAMES if renderers[name].opens_reasoning] == ["qwen3-thinking"]


def test_leading_system_messages_are_joined_and_later_ones_become_user_messages(renderers: dict[str, Renderer]) -> None:
    messages = [say(Role.SYSTEM, "One."), say(Role.SYSTEM, "Two."), ASKED, say(Role.SYSTEM, "Three.")]
    same = [say(Role.SYSTEM, "One.\n\nTwo."), ASKED, say(Role.USER, "Three.")]
    for name in NAMES:
        assert renderers[name].render(messages, []) == renderers[name].render(same, [])
        if renderers[name].bridges:
            assert bridged(renderers[name], "", [LS], DONE, say(Role.SYSTEM, "Three.")) == bridged(
                renderers[name], "", [LS], DONE, say(Role.USER, "Three.")
            )


def test_a_template_with_two_roles_renders_all_messages(renderers: dict[str, Renderer]) -> None:
    strict = renderers["strict"]
    turn = Message(Role.ASSISTANT, (Text("I look."), LS))
    shown = strict.decode(
        strict.render([say(Role.SYSTEM, "Be brief."), ASKED, turn, DONE, say(Role.USER, "Well?")], [])
    )
    assert shown == (
        "<s>[INST] Be brief.\n\nRepair calc.py. [/INST] I look.\n<tool_call>\n"
        '{"name": "bash", "arguments": {"command": "ls \\"a b\\""}}\n</tool_call></s>'
        "[INST] <tool_response>\ncalc.py\ntest.py\n\n</tool_response>\n\nWell? [/INST]"
    )
    listed = strict.decode(strict.render([ASKED], [BASH]))
    assert '<tools>\n{"type": "function", "function": {"name": "bash", ' in listed
    assert listed.endswith("</tool_call>\n\nRepair calc.py. [/INST]")


def test_parallel_calls_are_split_for_templates_with_single_calls(renderers: dict[str, Renderer]) -> None:
    llama = renderers["llama3.1"]
    both = [ASKED, Message(Role.ASSISTANT, (LS, CAT)), Message(Role.TOOL, (OUT, MORE))]
    split = [ASKED, Message(Role.ASSISTANT, (LS,)), Message(Role.ASSISTANT, (CAT,)), Message(Role.TOOL, (OUT, MORE))]
    assert llama.render(both, []) == llama.render(split, [])


def test_messages_that_a_template_cannot_render_are_refused(renderers: dict[str, Renderer]) -> None:
    with pytest.raises(TemplateRefused, match="must alternate"):
        renderers["strict"].render([Message(Role.ASSISTANT, (Text("Hello."),)), ASKED], [])
    with pytest.raises(TemplateRefused):
        renderers["qwen3"].render([], [])
    deep: dict[str, Any] = {}
    for _ in range(200):
        deep = {"of": deep}
    tools = [ToolSpec("bash", "", deep)]

    def below(frames: int) -> object:
        return below(frames - 1) if frames else renderers["qwen3"].render([ASKED], tools)

    with pytest.raises(TemplateRefused, match="nested too deeply"):
        below(700)


@pytest.mark.parametrize("arguments", ["{broken <|im_end|>", "[1]", '"{}"', "", "NaN", "[" * 5000, "9" * 5000])
def test_arguments_that_are_not_an_object_are_rendered_unchanged(
    renderers: dict[str, Renderer], arguments: str
) -> None:
    messages = [ASKED, Message(Role.ASSISTANT, (ToolCall("c", "bash", arguments),)), DONE]
    for name in NAMES:
        shown = renderers[name].decode(renderers[name].render(messages, []))
        expected = arguments.replace(
            "<|im_end|>", "< |im_end|>" if "im_end" in renderers[name].template else "<|im_end|>"
        )
        assert expected in shown or json.dumps(expected)[1:-1] in shown


@pytest.mark.parametrize("name", NAMES)
def test_message_content_is_never_rendered_as_control_tokens(renderers: dict[str, Renderer], name: str) -> None:
    family = next(family for family in templates.FAMILIES if family.name == name)
    spellings = [text for text in (*family.special, *family.plain) if text in family.special or "｜" in text]  # noqa: RUF001
    renderer = renderers[name]
    control = {renderer.render([ASKED], [])[0]} | set(renderer.stop_ids)
    assert control

    def skeleton(text: str) -> list[str]:
        arguments = json.dumps({text: [text, {"to": text}]})
        messages = [
            say(Role.SYSTEM, text),
            say(Role.USER, f"{text}{text}"),
            Message(Role.ASSISTANT, (Reasoning(f"a {text}"), Text(text), ToolCall("c", f"n{text}", arguments))),
            Message(Role.TOOL, (ToolResult(f"c{text}", f"\n{text}"),)),
            say(Role.SYSTEM, text),
        ]
        tool = ToolSpec("bash", text, {"type": "object", "properties": {text: {"description": text}}})
        pieces = [renderer.decode([token]) for token in renderer.render(messages, [tool])]
        if renderer.bridges:
            pieces.extend(renderer.decode([token]) for token in renderer.bridge(0, messages[2].calls, messages[3:]))
        return [piece for piece in pieces if piece in spellings]

    plain = skeleton("zz")
    for spelling in spellings:
        assert skeleton(spelling) == plain, spelling


def test_a_lone_surrogate_is_rendered_as_text(renderers: dict[str, Renderer]) -> None:
    qwen = renderers["qwen2.5"]
    assert "a\ufffdb" in qwen.decode(qwen.render([say(Role.USER, "a\ud800b")], []))
    assert "\U0001f600" in qwen.decode(qwen.render([say(Role.USER, "\ud83d\ude00")], []))


def test_renderer_properties_match_the_tokenizer(renderers: dict[str, Renderer], folders: dict[str, Path]) -> None:
    glm = renderers["glm4"]
    assert [glm.decode([stop]) for stop in glm.stop_ids] == ["<|endoftext|>", "<|user|>", "<|observation|>"]
    assert glm.template == (folders["glm4"] / "chat_template.jinja").read_text()
    assert glm.visible("a<|user|>b<think>c") == "ab<think>c"
    assert max(glm.render([ASKED], [BASH])) < glm.vocab_size == ChatTokenizer(folders["glm4"]).vocab_size


NINE_LETTERS = """{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{- raise_exception('ids have nine letters') }}{% endif %}
{{- '[RESULT]' ~ m.tool_call_id ~ m.content }}
{%- else %}{{- m.role ~ m.content }}
{%- for call in m.tool_calls or [] %}{{- call.function.name ~ call.function.arguments | tojson ~ call.id }}{% endfor %}
{%- if m.role == 'assistant' %}{{- eos_token }}{% endif %}
{%- endif %}
{%- endfor %}
"""
TEXT_ARGUMENTS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}"  # noqa: E501


def test_call_ids_and_arguments_have_the_format_required_by_the_template(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = templates.STRICT.write(tmp_path)
    messages = [ASKED, Message(Role.ASSISTANT, (LS, ToolCall("call_2", "bash", "{"))), DONE]
    (folder / "chat_template.jinja").write_text(NINE_LETTERS)
    renderer = load_renderer(folder)
    shown = renderer.decode(renderer.render(messages, []))
    call_id = shown.partition("[RESULT]")[2][:9]
    assert shown.count(call_id) == 2
    assert f"[RESULT]{call_id}" in bridged(renderer, "", [LS], DONE)
    other = ToolCall("call_3", LS.name, LS.arguments)
    assert "[RESULT]" in bridged(renderer, "", [other], Message(Role.TOOL, (ToolResult(other.id, "x"),)))
    (folder / "chat_template.jinja").write_text(TEXT_ARGUMENTS)
    renderer = load_renderer(folder)
    assert 'bash{"command": "ls \\"a b\\""}bash{' in renderer.decode(renderer.render(messages[:2], []))


LONG = "\n".join(f"{number}. Read the file, then run the test it names; never guess." for number in range(400))


def encoder_of(renderer: Renderer) -> PieceEncoder:
    assert isinstance(renderer, TemplateRenderer)
    return renderer._tokenizer._pieces


def test_prompts_that_differ_in_one_line_share_cached_tokens(folders: dict[str, Path]) -> None:
    renderer = load_renderer(folders["qwen2.5"])
    cache = encoder_of(renderer)._cache
    renderer.render([say(Role.SYSTEM, LONG), ASKED], [])
    first = cache.bytes_kept
    renderer.render([say(Role.SYSTEM, LONG), say(Role.USER, "Something else.")], [])
    assert cache.bytes_kept - first < 1000
    renderer.render([say(Role.SYSTEM, LONG.replace("\n17. Read", "\n17. Then read")), ASKED], [])
    assert cache.bytes_kept - first < first / 5


def test_the_cache_is_bounded(folders: dict[str, Path]) -> None:
    tokenizer, forgetful = (ChatTokenizer(folders["qwen2.5"], cache_bytes=size) for size in (50_000, 0))
    for number in range(30):
        text = LONG.replace("file", f"file{number}")
        assert tokenizer.encode(text) == forgetful.encode(text)
    assert forgetful._pieces._cache.bytes_kept == 0
    assert 0 < tokenizer._pieces._cache.bytes_kept <= 50_000


def test_threads_can_share_a_renderer(folders: dict[str, Path]) -> None:
    renderer = load_renderer(folders["qwen3"])
    conversations = [[say(Role.SYSTEM, LONG.replace("guess", f"g{n % 3}")), ASKED] for n in range(12)]
    other = load_renderer(folders["qwen3"])
    expected = [other.render(messages, [BASH]) for messages in conversations]
    found: list[Any] = [None] * len(conversations)

    def render(number: int) -> None:
        found[number] = renderer.render(conversations[number], [BASH])

    threads = [threading.Thread(target=render, args=(number,)) for number in range(len(conversations))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_text_without_words_between_spaces_is_split_in_linear_time(folders: dict[str, Path]) -> None:
    """80,000 small tools in 2 MB occupied the only thread that renders for minutes."""
    encoder = ChatTokenizer(folders["qwen2.5"], cache_bytes=0)._pieces
    line = '{"type": "function", "function": {"name": "t"}}\n'

    def seconds_a_megabyte(size: int) -> float:
        text = line * (size // len(line))
        began_s = time.process_time()
        encoder.ids(text)
        return (time.process_time() - began_s) * 1e6 / size

    # Four times as long, a search to the end of the text for each piece would take four times as long a piece.
    assert min(seconds_a_megabyte(2_000_000) for _ in range(3)) < 2 * min(seconds_a_megabyte(500_000) for _ in range(3))


@pytest.mark.parametrize(
    ("words", "cuts_lines"),
    [
        (r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|[^\r\n\p{L}\p{N}]?\p{L}+|\s*[\r\n]+|\s+(?!\S)|\s+", True),
        (r"\w+ ?|\s+|[^\w\s]+", False),
        (r"[^ ]+| ", False),
        (r"\s*\S+\s*", False),
    ],
)
def test_text_is_split_at_line_breaks_only_after_complete_words(words: str, cuts_lines: bool) -> None:
    tokenizer = templates.byte_level(words)
    tokenizer.add_special_tokens(["<|end|>"])
    encoder = PieceEncoder(tokenizer)
    assert encoder.cuts_tokens
    assert encoder.cuts_lines is cuts_lines


def test_tokens_that_absorb_their_neighbours_do_not_split_text() -> None:
    from tokenizers import AddedToken

    for flags in ({"rstrip": True}, {"lstrip": True}, {"single_word": True}):
        tokenizer = templates.byte_level(None)
        tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False, **flags)])
        assert not PieceEncoder(tokenizer).cuts_tokens
    spaced = templates.sentencepiece()
    spaced.add_special_tokens([AddedToken("</s>", normalized=False)])
    assert not PieceEncoder(spaced).cuts_tokens
    assert not PieceEncoder(spaced).cuts_lines


# Messages that the policy continues.

CONTINUING = ("qwen2.5", "deepseek-v3", "deepseek-v3-leaky")
"""Families whose templates leave every message open; the others rewrite or strip the policy's last message."""
SEARCH = "<search>q</search>"
FOUND = "\n\n<information>bog</information>\n\n"
TEXTS = (SEARCH, SEARCH + FOUND, " turf ", "", "<think>mire</think>\n\nturf", "\n\nturf", "Ünïcödé 漢字")
TALKS = (
    (say(Role.USER, "Who?"),),
    (say(Role.USER, "Who?"), templates.said("I see."), say(Role.USER, "And now?")),
    (say(Role.SYSTEM, "Be brief."), say(Role.USER, "Who?")),
)


@pytest.mark.parametrize("name", NAMES)
def test_an_open_message_matches_transformers_or_is_refused(
    folders: dict[str, Path], renderers: dict[str, Renderer], name: str
) -> None:
    from transformers import AutoTokenizer

    renderer, theirs = renderers[name], AutoTokenizer.from_pretrained(folders[name])
    assert renderer.continues is (name in CONTINUING)
    exact = 0
    for talk in TALKS:
        for text in TEXTS:
            messages = [*talk, say(Role.ASSISTANT, text)]
            try:
                ids = renderer.render(messages, [], Ending.OPEN)
            except TemplateRefused as error:
                assert name not in CONTINUING, (text, error)
                continue
            opened = renderer.render(talk, []).tolist()
            if text:
                shown = templates.as_dicts(messages)
                expected = theirs.apply_chat_template(shown, continue_final_message=True)["input_ids"]
                assert ids.tolist() == expected
            else:
                assert ids.tolist() == opened
            assert renderer.decode(ids) == renderer.decode(opened) + text
            exact += 1
    assert exact == len(TALKS) * len(TEXTS) if renderer.continues else exact < len(TALKS) * len(TEXTS)


@pytest.mark.parametrize("name", CONTINUING[:2])
def test_a_bridge_leaves_a_message_open(renderers: dict[str, Renderer], name: str) -> None:
    renderer = renderers[name]
    closed = renderer.bridge(renderer.stop_ids[0], [], [say(Role.USER, "And now?")])
    opened = renderer.bridge(
        renderer.stop_ids[0], [], [say(Role.USER, "And now?"), templates.said("So:\n\n")], Ending.OPEN
    )
    assert renderer.decode(opened) == renderer.decode(closed) + "So:\n\n"


@pytest.mark.parametrize("name", NAMES)
def test_an_inserted_text_is_tokenized_apart_and_exactly(renderers: dict[str, Renderer], name: str) -> None:
    renderer = renderers[name]
    before = renderer.render([say(Role.USER, "Who?")], [])
    for text in (FOUND, " bog", "bog", ">", "", "\n"):
        assert renderer.decode([*before, *renderer.insert(text)]) == renderer.decode(before) + text


def test_control_tokens_in_an_inserted_text_are_text(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["qwen2.5"]
    ids = renderer.insert("<|im_end|>\n<|im_start|>user")
    assert not set(ids) & {*renderer.stop_ids, renderer.render([say(Role.USER, "x")], [])[0]}


@pytest.mark.parametrize("name", NAMES)
def test_recorded_turns_continue_under_every_template(
    folders: dict[str, Path], renderers: dict[str, Renderer], name: str
) -> None:
    """Also where the template cannot leave a message open: nothing is rendered but the insertion."""
    renderer, encode = renderers[name], ChatTokenizer(folders[name]).encode
    core = Session(SessionSpec(session_id=SessionId("rollout-1")), opened_at=0.0)
    played = Rig(core, renderer, tokenize=encode)
    first = played.turn(asks(ASKED, stop=("</search>",), keeps_stop=True), encode(SEARCH))
    assert first.text == renderer.decode(played.outputs[0]) == SEARCH
    played.turn(asks(ASKED, templates.said(SEARCH + FOUND), continues=True), "so")
    assert played.prompts[1] == [*played.prompts[0], *played.outputs[0], *renderer.insert(FOUND)]
    report = report_of(core)
    assert (report.masked, len(report.lineages)) == ({}, 1)


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_tokens_joined_are_the_text(name: str, renderers: dict[str, Renderer]) -> None:
    renderer = renderers[name]
    for text in ("Ünïcödé und 漢字 are 🧪 text.\n", "<think>\na  b\n</think>", "x" * 300):
        ids = [*renderer.insert(text), renderer.stop_ids[0]]
        pieces = [*map(renderer.token_bytes, ids)]
        assert b"".join(pieces).decode() == renderer.decode(ids)
        assert all(pieces)


def test_a_part_of_a_character_has_its_own_bytes(renderers: dict[str, Renderer]) -> None:
    ids = renderers["qwen3"].insert("🧪")
    assert len(ids) > 1
    assert [*map(renderers["qwen3"].token_bytes, ids)] == [bytes([byte]) for byte in "🧪".encode()]
    assert renderers["qwen3"].token_bytes(renderers["qwen3"].vocab_size + 5) == b"", "padding of the model's vocabulary"


def test_tokens_of_a_sentencepiece_vocabulary_have_their_bytes() -> None:
    vocabulary = {"<unk>": 0, "▁to": 1, "do": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokens = TokenBytes(tokenizer)
    ids = [1, 2, *(byte + 3 for byte in "é".encode())]
    assert [*map(tokens.of, ids)] == [b" to", b"do", b"\xc3", b"\xa9"]
    assert b"".join(map(tokens.of, ids)).decode() == tokenizer.decode(ids)
