"""For any split of a message into sampled and inserted pieces, its row is what the engine was sent and sampled."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.policies.engine import FinishReason
from headrace.policies.tokens.tokenizer import ChatTokenizer
from headrace.serve.gateway.capture.rows import report_of
from headrace.serve.gateway.capture.session import Session, SessionId, SessionSpec
from headrace.serve.gateway.capture.session_log import Opened, SessionLog
from headrace.serve.gateway.conversation import Role, say
from headrace.serve.gateway.http import codec
from headrace.serve.gateway.rendering.render import Renderer
from headrace.serve.gateway.rendering.template_renderer import load_renderer
from support.chat_templates import QWEN3, QWEN25, STRICT
from support.session_rig import Rig, asks, user

STOP = "</search>"
WORDS = st.text(alphabet="ab \n<>/.éß漢", max_size=12)
OVERRUNS = WORDS | st.just("") | WORDS.map(lambda text: f"{text}{STOP}{text}")


@pytest.fixture(scope="module", params=[QWEN25, QWEN3, STRICT], ids=lambda family: family.name)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Renderer, ChatTokenizer]:
    folder: Path = request.param.write(tmp_path_factory.mktemp(request.param.name))
    return load_renderer(folder), ChatTokenizer(folder)


@st.composite
def sampled(draw: st.DrawFn, tokenizer: ChatTokenizer) -> list[int]:
    """Ids of a text with a stop string, tokenized in random pieces, as no tokenizer would do it; the engine may go
    on."""
    text = draw(WORDS) + STOP + draw(OVERRUNS)
    cuts = sorted(draw(st.sets(st.integers(1, len(text)), max_size=6)) | {len(text)})
    ids: list[int] = []
    for start, end in zip([0, *cuts], cuts, strict=False):
        # As an insertion: sentencepiece would begin each piece with a blank.
        ids += tokenizer.insert(text[start:end])
    return ids


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_row_is_what_the_engine_was_sent_and_sampled(
    model: tuple[Renderer, ChatTokenizer], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    renderer, tokenizer = model
    played = Rig(Session(SessionSpec(session_id=SessionId("r")), 0.0), renderer, tokenize=tokenizer.encode)
    keeps = data.draw(st.booleans())
    message, inserted, expected = "", "", list[int]()
    for number in range(data.draw(st.integers(2, 5)) + 1):
        ids = data.draw(sampled(tokenizer))
        ending = [user("task"), say(Role.ASSISTANT, message)] if number else [user("task")]
        request = asks(*ending, continues=number > 0, stop=(STOP,), keeps_stop=keeps)
        finish = data.draw(st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
        answer = played.turn(request, ids, finish=finish)
        assert answer.stop_string == STOP
        shown = answer.text + ("" if keeps else STOP)
        assert renderer.decode(ids).startswith(shown)
        if number:
            assert played.prompts[-1] == [*expected, *renderer.insert(inserted)]
        node = played.core.trie.sampled[-1]
        assert ids[: len(node.ids)] == list(node.ids)
        text = renderer.decode(node.ids)
        assert (text.endswith(STOP) and text.count(STOP) == 1) or node.border
        expected = played.prompts[-1] + list(node.ids)
        inserted = data.draw(WORDS)
        message += shown + inserted
    report = report_of(played.core)
    assert report.sampled_tokens == sum(map(len, played.outputs)) == report.trained_tokens + sum(report.masked.values())
    assert set(report.masked) <= {"overrun", "stop_border"}
    assert report.trajectory is not None
    [row] = report.trajectory.rows
    assert row.tokens_T.tolist() == expected
    mask, place = row.loss_mask_T.tolist(), 0
    for prompt, node in zip(played.prompts, played.core.trie.sampled, strict=True):
        end = len(prompt) + len(node.ids)
        assert mask[place:end] == [False] * (len(prompt) - place) + [not node.border] * len(node.ids)
        assert row.logprobs_T[len(prompt) : end].tolist() == list(node.logprobs)
        place = end
    covered = [position for span in row.versions for position in range(span.start, span.end)]
    turns = zip(played.prompts, played.core.trie.sampled, strict=True)
    assert covered == [len(prompt) + place for prompt, node in turns for place in range(len(node.ids))]

    log = SessionLog(tmp_path_factory.mktemp("log"))
    log.open(Opened(spec=played.core.spec, token="t" * 32, opened_at=0.0))
    for event in played.events:
        log.append(SessionId("r"), event)
    again = log.load(SessionId("r"))
    assert codec.write_report(report_of(again)) == codec.write_report(report)
    request = asks(user("task"), say(Role.ASSISTANT, message), continues=True)
    found, known = again.match(request), played.core.match(request)
    assert (found.parent and found.parent.turn_id, found.rest) == (known.parent and known.parent.turn_id, known.rest)
    assert found.resumes
