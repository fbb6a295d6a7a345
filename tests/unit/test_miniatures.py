"""The generated data of miniatures: reproducible, disjoint, and spelled as the gateway spells it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.buffer.datasets.facts import VALUES, facts, questions, write_corpus
from headrace.buffer.datasets.terminal import Split
from headrace.policies.miniatures import names
from headrace.policies.miniatures.building import MINIATURES
from headrace.policies.miniatures.fitting import FitConfig, fit
from headrace.policies.models.qwen_config import QwenConfig
from headrace.policies.models.tiny import model_config, write_description
from headrace.policies.tokens.tokenizer import ChatTokenizer


def test_splits_share_no_question_and_cover_all_facts() -> None:
    train, held_out = questions(0, 1000, Split.TRAIN), questions(0, 1000, Split.HELD_OUT)
    assert not {task.instruction for task in train} & {task.instruction for task in held_out}
    assert len(train) + len(held_out) == len(facts()) == 288
    assert len(held_out) >= 64


def test_questions_depend_on_the_seed_only_in_their_order() -> None:
    one, two = questions(1, 1000, Split.TRAIN), questions(2, 1000, Split.TRAIN)
    assert one != two
    assert {task.id for task in one} == {task.id for task in two}
    assert questions(1, 20, Split.TRAIN) == one[:20]


def test_every_answer_is_in_one_passage_only(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    contents = [json.loads(line)["contents"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    for fact in facts():
        assert [text for text in contents if fact.query in text] == [f'"{fact.entity}"\n{fact.passage}']
    assert len({fact.value for fact in facts()}) == len(VALUES)


@pytest.mark.parametrize("name", names.NAMES)
def test_demonstrations_are_short_and_use_the_vocabulary(tmp_path: Path, name: str) -> None:
    """Few tokens are bytes: the policy is meant to copy words, not letters."""
    miniature = MINIATURES[name]
    write_description(tmp_path, miniature.pieces, miniature.chat_template)
    tokenizer = ChatTokenizer(tmp_path)
    demonstrator = miniature.demonstrator(tokenizer, 0, miniature.fit)
    shown = demonstrator.batch(50, step=0) + demonstrator.batch(50, step=miniature.fit.steps - 1)
    assert all(any(one.trained) and not one.trained[0] for one in shown)
    assert max(len(one.tokens) for one in shown) <= 128
    tokens = [token for one in shown for token in one.tokens]
    assert sum(token < 256 for token in tokens) / len(tokens) < 0.15


def test_a_warm_start_learns_and_is_reproducible(tmp_path: Path) -> None:
    miniature = MINIATURES["search_r1"]
    write_description(tmp_path, miniature.pieces)
    tokenizer = ChatTokenizer(tmp_path)
    model = QwenConfig.from_keys(model_config(miniature.pieces), source="test")
    config = FitConfig(steps=3, batch_size=4)
    weights = [fit(config, model, miniature.demonstrator(tokenizer, 0, config)) for _ in range(2)]
    assert weights[0].equal(weights[1])
    assert not weights[0].equal(
        fit(FitConfig(steps=1, batch_size=4), model, miniature.demonstrator(tokenizer, 0, config))
    )


def test_paths_of_miniatures_are_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = names.resolved("miniature:search_r1/model")
    assert path.is_relative_to(tmp_path / "headrace" / "miniatures")
    assert names.name_of(path) == "search_r1"
    assert names.name_of(tmp_path) is None
    with pytest.raises(names.MiniatureUnknown, match="there is no miniature 'search'; there are endless,"):
        names.resolved("miniature:search/model")
