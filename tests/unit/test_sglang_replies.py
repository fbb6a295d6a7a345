"""What a client makes of versions, replies and refusals; pure."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from typing import Any

import pytest

from headrace.buffer.trajectories.types import VersionSpan
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies import errors
from headrace.policies.engine import Completion, GenerateRequest, Grammar, GrammarKind, RequestId
from headrace.policies.sglang.replies import generate_body, mark_stale, parse_completion
from headrace.policies.sglang.transport import refusal
from headrace.policies.sglang.versions import DIALECTS, dialect_of

META = {
    "finish_reason": {"type": "length", "length": 4},
    "weight_version": "1.3",
    "output_token_logprobs": [[-0.5, token, None] for token in range(4)],
    "prompt_tokens": 3,
    "cached_tokens": 2,
    "num_retractions": 0,
}


def completion(*edges: tuple[str, int, int], **meta: Any) -> Completion:
    spans = [{"version": version, "start": start, "end": end} for version, start, end in edges]
    told = {"weight_versions": spans} if edges else {}
    reply = {"text": "", "output_ids": [0, 1, 2, 3], "meta_info": META | told | meta}
    return parse_completion(reply, expects_spans=bool(edges))


def stale(spans: tuple[VersionSpan, ...]) -> list[bool]:
    return [span.stale_kv for span in spans]


def test_known_versions_have_their_own_dialect_and_the_embedded_engine_the_newest() -> None:
    for dialect in DIALECTS:
        assert dialect_of(dialect.version) is dialect
    assert dialect_of("headrace-cpu 0.1.0") is DIALECTS[-1]
    oldest = DIALECTS[0]
    assert (oldest.update_session, oldest.version_spans, oldest.ready_route) == (False, False, False)


@pytest.mark.parametrize(
    ("version", "spoken"),
    [("0.5.22", "0.5.21"), ("0.5.9", "0.5.15.post1"), ("0.6.0", "0.5.23"), ("0.5.15", "0.5.15.post1"), ("dev", None)],
)
def test_unknown_versions_get_the_nearest_older_one_with_one_warning(
    version: str, spoken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    dialect_of.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert dialect_of(version).version == (spoken or DIALECTS[0].version)
        dialect_of(version)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("headrace")]
    assert [text.split(" is ")[0] for text in said] == [f"SGLang {version}"]


def test_versions_that_sampled_no_token_are_dropped() -> None:
    spans = completion(("1.2", 0, 0), ("1.3", 0, 3), ("1.4", 3, 3), ("1.5", 3, 4), ("1.6", 4, 4)).spans
    assert [(str(span.version), span.start, span.end) for span in spans] == [("1.3", 0, 3), ("1.5", 3, 4)]


def test_a_dialect_without_spans_labels_the_whole_output_with_one_version() -> None:
    assert completion().spans == (VersionSpan(start=0, end=4, version=PolicyVersion(1, 3)),)
    with pytest.raises(errors.EngineReplyInvalid, match="weight_version"):
        completion(weight_version=None)
    with pytest.raises(errors.EngineReplyInvalid, match="weight_versions"):
        parse_completion({"text": "", "output_ids": [0, 1, 2, 3], "meta_info": META})


def test_tokens_after_a_version_change_are_stale() -> None:
    changed = completion(("1.3", 0, 1), ("1.4", 1, 3), ("1.5", 3, 4))
    assert stale(mark_stale(changed, "1.3")) == [False, True, True]
    assert stale(mark_stale(completion(("1.3", 0, 4)), "1.3")) == [False]
    # A label may come back; the keys and values of what was between do not go.
    assert stale(mark_stale(completion(("1.3", 0, 1), ("1.4", 1, 3), ("1.3", 3, 4)), "1.3")) == [False, True, True]


@pytest.mark.parametrize("cached_tokens", [0, 2])
def test_all_tokens_are_stale_if_the_cache_is_from_another_version(cached_tokens: int) -> None:
    done = completion(("1.3", 0, 4), cached_tokens=cached_tokens)
    assert stale(mark_stale(done, "1.3")) == [False]
    assert stale(mark_stale(done, "1.2")) == [True]
    assert stale(mark_stale(done, None)) == [True]
    assert mark_stale(replace(done, spans=()), "1.2") == ()


def test_the_cache_namespace_is_sent_only_if_set() -> None:
    request = GenerateRequest(request_id=RequestId("r"), input_ids=(1,), max_new_tokens=1)
    assert "extra_key" not in generate_body(request)
    sent = generate_body(request)["sampling_params"]
    assert isinstance(sent, dict)
    neutral = {"min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1, "min_new_tokens": 0}
    assert {name: sent[name] for name in neutral} == neutral, "a server may prefer others"
    assert generate_body(replace(request, cache_namespace="1.3"))["extra_key"] == "1.3"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            'Failed to compile json grammar: [11:20:18] /cpp/converter.cc:4175: Unsupported type "x"\n',
            'Unsupported type "x"',
        ),
        ("Failed to compile structural_tag grammar: Invalid type: nope", "Invalid type: nope"),
        ("Grammar preprocessing timed out: req.grammar_key=('json', '{}')", "it takes too long to compile"),
    ],
)
def test_a_refused_grammar_gives_its_reason_without_places(text: str, reason: str) -> None:
    error = refusal(400, "/generate", text, "one")
    assert isinstance(error, errors.GrammarRefused)
    assert error.reason == reason


def test_a_grammar_is_sent_as_the_sampling_parameter_of_its_kind() -> None:
    request = GenerateRequest(request_id=RequestId("r"), input_ids=(1,), max_new_tokens=1)
    plain = generate_body(request)["sampling_params"]
    assert isinstance(plain, dict)
    for kind, name in ((GrammarKind.JSON_SCHEMA, "json_schema"), (GrammarKind.STRUCTURAL_TAG, "structural_tag")):
        sent = generate_body(replace(request, grammar=Grammar(kind=kind, text="{}")))["sampling_params"]
        assert sent == {**plain, name: "{}"}


@pytest.mark.parametrize(
    ("path", "text", "kind"),
    [
        ("/begin_weight_update", "a weight-update session is already open; call ...", errors.SessionAlreadyOpen),
        ("/begin_weight_update", "selector must be", errors.EngineRefused),
        ("/end_weight_update", "no weight-update session is open; call ...", errors.NoSession),
        ("/update_weights_from_distributed", "update_... must run between begin_...", errors.NoSession),
        ("/update_weights_from_tensor", "update_... must run between begin_...", errors.NoSession),
        ("/update_weights_from_distributed", "Failed to receive weights: Group g not in []. ", errors.UnknownGroup),
        ("/update_weights_from_distributed", "Failed to receive weights: timed out", errors.EngineRefused),
        ("/update_weights_from_distributed", "Weights were updated, but the cache ...", errors.WeightsMixed),
        ("/update_weights_from_disk", "... partially updated. Please discard", errors.WeightsMixed),
        ("/destroy_weights_update_group", "The group to be destroyed does not exist.", errors.UnknownGroup),
        ("/flush_cache", "Flush cache failed.", errors.FlushRefused),
        ("/generate", "Flush cache failed.", errors.EngineRefused),
        ("/generate", "Failed to compile json grammar: unsupported: 'partially updated'", errors.GrammarRefused),
        ("/generate", "Failed to compile structural_tag grammar: ...", errors.GrammarRefused),
        ("/generate", "Grammar preprocessing timed out: req.grammar_key=...", errors.GrammarRefused),
        ("/generate", "Grammar-based generation (json_schema, ...) is not supported when ...", errors.GrammarMissing),
    ],
)
def test_refusals_raise_typed_errors_that_survive_pickling(
    path: str, text: str, kind: type[errors.EngineRefused]
) -> None:
    error = refusal(400, path, text, "one")
    assert type(error) is kind
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.status, str(again)) == (kind, 400, f"engine answered 400: one: {path}: {text}")
