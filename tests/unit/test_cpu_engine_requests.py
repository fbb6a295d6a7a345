"""Bodies of /generate: what is accepted, and every refusal names its key."""

from __future__ import annotations

import pytest

from headrace.policies.cpu_engine.requests import ModelLimits, parse_generate
from headrace.policies.errors import RequestInvalid

LIMITS = ModelLimits(vocab_size=100, context_tokens=64)


def parse(body: object):
    return parse_generate(body, LIMITS, lambda text: [ord(letter) % 100 for letter in text])


def test_request_defaults_match_sglang() -> None:
    (prompt,) = parse({"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 5}}).prompts
    sampling = prompt.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.n) == (1.0, 1.0, -1, 1)
    assert not prompt.return_logprob


def test_batched_requests_and_samples_are_named_as_in_sglang() -> None:
    parsed = parse({"rid": "bat", "input_ids": [[1], [2]], "sampling_params": {"max_new_tokens": 5}})
    assert [prompt.request_id for prompt in parsed.prompts] == ["bat_0", "bat_1"]
    assert parsed.listed
    parsed = parse({"rid": "one", "input_ids": [1], "sampling_params": {"max_new_tokens": 5, "n": 2}})
    assert [prompt.request_id for prompt in parsed.prompts] == ["one_0", "one_1"]
    assert parsed.listed


def test_unknown_top_level_keys_are_ignored() -> None:
    assert parse({"input_ids": [1], "sampling_params": {"max_new_tokens": 5}, "extra_key": "1.0", "unheard_of": 1})


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ([], "object"),
        ({}, "input_ids"),
        ({"input_ids": [1], "text": "a"}, "not both"),
        ({"input_ids": []}, "empty"),
        ({"input_ids": [[]]}, "empty"),
        ({"input_ids": [1, 100]}, "100"),
        ({"input_ids": [-1]}, "-1"),
        ({"input_ids": [True]}, "True"),
        ({"input_ids": [1.0]}, r"1\.0"),
        ({"input_ids": [None]}, "None"),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": [1] * 64}, "longer than the model's context length"),
        ({"input_ids": [1] * 5000}, "longer than the model's context length"),
        ({"input_ids": [[1]] * 65, "sampling_params": {"n": 64}}, "4160 sequences"),
        ({"input_ids": [[1]] * 5000}, "more than 4096 entries"),
        ({"text": "a" * 64 * 257}, "characters"),
        ({"text": ["a" * 64 * 129] * 2}, "characters"),
        ({"input_ids": [1] * 10, "sampling_params": {"max_new_tokens": 55}}, "total of 65 tokens"),
        ({"input_ids": [1], "sampling_params": {"temprature": 1}}, "temprature"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1.0}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"temperature": "hot"}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"temperature": float("inf")}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [1], "sampling_params": {"top_p": 1.5}}, "top_p"),
        ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "n"),
        ({"input_ids": [1], "sampling_params": {"sampling_seed": -1}}, "sampling_seed"),
        ({"input_ids": [1], "sampling_params": {"regex": "a+"}}, "regex"),
        ({"input_ids": [1], "sampling_params": [{}, {}]}, "sampling_params"),
        ({"input_ids": [1], "sampling_params": 3}, "sampling_params"),
        ({"input_ids": [1], "stream": True}, "stream"),
        ({"input_ids": [1], "logprob_start_len": 0}, "logprob_start_len"),
        ({"input_ids": [1], "rid": 3}, "rid"),
        ({"input_ids": [[1], [1]], "rid": ["a", "a"]}, "unique"),
        ({"input_ids": [1], "return_logprob": "yes"}, "return_logprob"),
    ],
)
def test_refusals_name_the_offending_key(body: object, named: str) -> None:
    if isinstance(body, dict):
        body = {"sampling_params": {"max_new_tokens": 5}, **body}
    with pytest.raises(RequestInvalid, match=named):
        parse(body)
