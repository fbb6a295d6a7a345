"""The generated data of miniatures: reproducible, disjoint, and spelled as the gateway spells it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.actors.agents.loop.contexts import HeadAndTail, head_share, marker
from headrace.actors.services.chat import ChatMessage
from headrace.buffer.tasks.datasets.facts import VALUES, facts, questions, write_corpus
from headrace.buffer.tasks.datasets.terminal import Split
from headrace.policies.miniatures import names
from headrace.policies.miniatures.building import MINIATURES
from headrace.policies.miniatures.demonstrations import DemonstrationMessage
from headrace.policies.miniatures.fitting import FitConfig, fit
from headrace.policies.miniatures.repairs import SWE, fenced, observed, repairs, source
from headrace.policies.models.qwen_config import QwenConfig
from headrace.policies.models.tiny import model_config, write_description
from headrace.policies.tokens.tokenizer import ChatTokenizer

ROOT = Path(__file__).resolve().parents[2]


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


async def test_the_recipe_of_repairs_cuts_the_last_prompt_of_a_whole_session(tmp_path: Path) -> None:
    """A session that looks, edits and checks is shown whole until its last prompt, from which two turns are cut."""
    recipe = tomllib.loads((ROOT / "scripts/recipes/swe_rl.toml").read_text())
    sampling, loop = recipe["sampling"], recipe["agent"]["loop"]
    write_description(tmp_path, SWE.pieces, SWE.chat_template)
    tokenizer = ChatTokenizer(tmp_path)

    async def count(messages: Sequence[ChatMessage]) -> int:
        return len(tokenizer.render([DemonstrationMessage(role=one.role, content=one.content) for one in messages]))

    for repair in repairs(Split.HELD_OUT)[::40]:
        context = HeadAndTail(
            budget_tokens=sampling["max_context_tokens"] - sampling["max_tokens_per_turn"],
            head_share=head_share(loop["context"]) or 0.0,
            count=count,
        )
        opening = [ChatMessage(role="user", content=repair.issue)]
        values = repair.values()[repair.module]
        wrong = values[repair.name]
        said = [
            (f"grep {repair.name} *.py", f"{repair.module}:{repair.name} = '{wrong}'"),
            (f"sed -i s/{wrong}/{repair.right}/ {repair.module}", ""),
            (f"cat {repair.module}", source(values | {repair.name: repair.right}).rstrip("\n")),
        ]
        turns = [
            [
                ChatMessage(role="assistant", content=fenced(command)),
                ChatMessage(role="user", content=observed(output, loop["max_turns"] - number)),
            ]
            for number, (command, output) in enumerate(said, start=1)
        ]
        for count_of_turns in range(3):
            shown = await context.shown(opening, turns[:count_of_turns])
            assert len(shown) == 1 + 2 * count_of_turns
        cut = await context.shown(opening, turns)
        assert cut == [*opening, marker(2), *turns[2]]
