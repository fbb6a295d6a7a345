"""Search in a corpus, and the requests that a retriever takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.actors.services.corpus import CorpusRefused, PassageIndex, digest_of, read_passages
from headrace.actors.services.retriever_server import SearchInvalid, parse_request
from support.corpora import write_corpus


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> PassageIndex:
    return PassageIndex(write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl", 200))


def test_a_search_finds_the_passage_that_has_the_words(index: PassageIndex) -> None:
    for number in (0, 17, 199):
        [found] = index.search([f"Where is town{number} ?"], 3)
        assert found[0].contents == index.passages[number]
        scores = [passage.score or 0.0 for passage in found]
        assert scores == sorted(scores, reverse=True)


def test_equal_scores_are_ordered_by_position_and_there_is_always_something(index: PassageIndex) -> None:
    """The policy writes the queries, and nonsense is no outage."""
    for query in ("nonsense", "", "the", "???"):
        assert [passage.contents for passage in index.search([query], 3)[0]] == list(index.passages[:3])
    [all_of_them] = index.search(["river"], 100)
    assert index.search(["river"], 5) == [all_of_them[:5]]


def test_a_corpus_smaller_than_the_number_asked_for_is_returned_whole(tmp_path: Path) -> None:
    index = PassageIndex(write_corpus(tmp_path / "corpus.jsonl", 2))
    assert [len(row) for row in index.search(["town1", "x"], 3)] == [2, 2]


def test_a_corpus_of_common_words_alone_can_be_searched(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": 1, "contents": "the of"}\n{"id": 2, "contents": "???"}\n')
    assert [len(row) for row in PassageIndex(path).search(["the", "river"], 1)] == [1, 1]


def test_the_digest_is_that_of_the_file(index: PassageIndex, tmp_path: Path) -> None:
    assert digest_of(write_corpus(tmp_path / "copy.jsonl", 200)) == index.digest


def test_a_file_without_lines_is_refused_before_it_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.actors.services.corpus.MAX_LINE_BYTES", 64)
    path = tmp_path / "corpus.jsonl"
    path.write_text(json.dumps({"id": "1", "contents": "x" * 64}))
    with pytest.raises(CorpusRefused, match="line 1: longer than"):
        list(read_passages(path))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "the body is not valid JSON"),
        (b"[]", "the body is not an object"),
        (b"{}", "queries: must be a list of one or more strings"),
        (b'{"queries": []}', "queries: must be a list of one or more strings"),
        (b'{"queries": "who"}', "queries: must be a list of one or more strings"),
        (b'{"queries": ["who", 1]}', "queries: must be a list of one or more strings"),
        (b'{"queries": ["who"], "topk": 0}', "topk: must be a whole number from 1 to 100"),
        (b'{"queries": ["who"], "topk": 101}', "topk: must be a whole number from 1 to 100"),
        (b'{"queries": ["who"], "topk": true}', "topk: must be a whole number from 1 to 100"),
        (b'{"queries": ["who"], "topk": 2.5}', "topk: must be a whole number from 1 to 100"),
        (b'{"queries": ["who"], "return_scores": 1}', "return_scores: must be true or false"),
    ],
)
def test_a_request_that_does_not_follow_the_contract_is_refused(body: bytes, says: str) -> None:
    with pytest.raises(SearchInvalid, match=says):
        parse_request(body)


PLAIN = st.none() | st.booleans() | st.integers(-200, 200) | st.text(max_size=3)
VALUES: Any = PLAIN | st.lists(PLAIN, max_size=2)


@given(st.dictionaries(st.sampled_from(["queries", "topk", "return_scores", "other"]), VALUES))
def test_any_document_is_a_request_or_refused(document: dict[str, Any]) -> None:
    try:
        request = parse_request(orjson.dumps(document))
    except SearchInvalid:
        return
    assert request.queries
    assert 1 <= request.top_k <= 100
