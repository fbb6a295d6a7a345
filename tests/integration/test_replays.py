"""Generated sessions of agents, played over HTTP and checked by code that shares nothing with the gateway."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.gateway_rig import world
from support.replays.checker import violations
from support.replays.player import MARKER, Script, play
from support.replays.sessions import STYLES
from support.scripted_engine import Sampled

ALL = ["main", "side", "abandoned"]
FEW, MANY = 3, 40
ECHOES = [style for style, make in STYLES.items() if make(0)["echoes"]]


async def replay(
    model_dir: Path, folder: Path, style: str, seeds: list[int], train: list[str]
) -> tuple[list[str], int, int]:
    """Write the sessions as JSON, play what was written, and return the violations, and the trained and the sampled
    tokens."""
    wrong, trained, sampled = list[str](), 0, 0
    for seed in seeds:
        path = folder / f"{style}-{seed}.json"
        path.write_text(json.dumps(STYLES[style](seed)))
        script = Script()
        async with world(model_dir, script) as w:
            opened = {"session_id": "replayed", "train": train, "max_context_tokens": 32768}
            status, session = await w.post("/sessions", opened)
            assert status == 200, session
            played = await play(json.loads(path.read_text()), w.http, session["base_url"], script)
            status, report = await w.post("/sessions/replayed/finish", {"tree": True})
            assert status == 200, report
            [engine] = w.engines
            found = violations(played, engine.sampled, report, version=engine.version)
        wrong += [f"{style}, seed {seed}: {each}" for each in found]
        trained, sampled = trained + report["trained_tokens"], sampled + report["sampled_tokens"]
    return wrong, trained, sampled


def drawn(number: int) -> list[int]:
    """Return seeds that were drawn now, and print them: pytest shows them if the test fails."""
    seeds = [secrets.randbelow(10**6) for _ in range(number)]
    print("seeds", seeds)
    return seeds


@pytest.mark.parametrize("number", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("style", STYLES)
async def test_generated_sessions_have_no_violation(model_dir: Path, tmp_path: Path, style: str, number: int) -> None:
    wrong, trained, sampled = await replay(model_dir, tmp_path, style, drawn(number), ["main"])
    assert wrong == []
    assert sampled > 0
    if style in ECHOES:
        assert trained >= 0.99 * sampled


@pytest.mark.parametrize("style", STYLES)
async def test_every_sampled_token_is_trained_if_asked(model_dir: Path, tmp_path: Path, style: str) -> None:
    wrong, trained, sampled = await replay(model_dir, tmp_path, style, drawn(FEW), ALL)
    assert wrong == []
    assert trained == sampled > 0


def token_changed(sampled: list[Sampled], report: dict[str, Any]) -> None:
    report["rows"][0]["tokens"][5] += 1


def trained_twice(sampled: list[Sampled], report: dict[str, Any]) -> None:
    report["rows"].append(report["rows"][0])


def mask_shifted(sampled: list[Sampled], report: dict[str, Any]) -> None:
    mask = report["rows"][0]["loss_mask"]
    mask.append(mask.pop(0))


def logprob_of_another(sampled: list[Sampled], report: dict[str, Any]) -> None:
    row = report["rows"][0]
    at = row["loss_mask"].index(1)
    row["logprobs"][at : at + 2] = reversed(row["logprobs"][at : at + 2])


def span_lost(sampled: list[Sampled], report: dict[str, Any]) -> None:
    report["rows"][0]["versions"].pop()


def token_lost(sampled: list[Sampled], report: dict[str, Any]) -> None:
    report["sampled_tokens"] -= 1


def word_undone(sampled: list[Sampled], report: dict[str, Any]) -> None:
    sampled[1] = replace(sampled[1], prompt=sampled[1].prompt + " mk999x")


def word_missing(sampled: list[Sampled], report: dict[str, Any]) -> None:
    sampled[1] = replace(sampled[1], prompt=MARKER.sub("", sampled[1].prompt, count=1))


def answer_of_another(sampled: list[Sampled], report: dict[str, Any]) -> None:
    sampled[1] = replace(sampled[1], text="mk998x")


@pytest.mark.parametrize(
    "fault",
    [
        token_changed,
        trained_twice,
        mask_shifted,
        logprob_of_another,
        span_lost,
        token_lost,
        word_undone,
        word_missing,
        answer_of_another,
    ],
)
async def test_the_checker_finds_a_planted_fault(
    model_dir: Path, fault: Callable[[list[Sampled], dict[str, Any]], None]
) -> None:
    script = Script()
    async with world(model_dir, script) as w:
        _, session = await w.post("/sessions", {"session_id": "replayed", "max_context_tokens": 32768})
        played = await play(STYLES["text-loop"](0), w.http, session["base_url"], script)
        _, report = await w.post("/sessions/replayed/finish", {"tree": True})
        [engine] = w.engines
    assert violations(played, engine.sampled, report, version=engine.version) == []
    fault(engine.sampled, report)
    assert violations(played, engine.sampled, report, version=engine.version) != []
