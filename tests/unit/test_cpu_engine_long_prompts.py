"""Long prompts are computed in portions, between which the engine answers and obeys."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from headrace.policies.cpu_engine.requests import Prompt, SamplingParams
from headrace.policies.cpu_engine.runner import PREFILL_PORTION, Runner
from headrace.policies.cpu_engine.scheduler import Generation, Scheduler
from headrace.policies.cpu_engine.thread import EngineThread
from headrace.policies.engine import PauseMode
from headrace.policies.models.qwen import read_weights
from headrace.policies.models.qwen_config import QwenConfig

CONTEXT_TOKENS = 2048
LONG = 2 * PREFILL_PORTION + 200
PORTIONS = 3


@pytest.fixture
def runner(tiny_model_dir: Path) -> Runner:
    config = QwenConfig.read(tiny_model_dir / "config.json")
    weights = read_weights(config, tiny_model_dir)
    return Runner(config, weights, version="1.0", max_running=4, context_tokens=CONTEXT_TOKENS, seed=0)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(max_running=4, max_prefill_tokens=4096, eos_ids=frozenset(), tail_text=str)


def generation(name: str, length: int, *, tokens: int = 4) -> Generation:
    ids = torch.randint(64, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    sampling = SamplingParams.model_validate({"max_new_tokens": tokens, "temperature": 0})
    return Generation(prompt=Prompt(request_id=name, input_ids=tuple(ids), sampling=sampling, return_logprob=True))


def run_to_end(runner: Runner, scheduler: Scheduler) -> None:
    while scheduler.runnable:
        runner.step(scheduler)


def expected_ids(runner: Runner, item: Generation) -> list[int]:
    ids = list(item.prompt.input_ids)
    for _ in item.output_ids:
        ids.append(int(runner.model.logits([ids])[0, -1].argmax()))
    return ids[len(item.prompt.input_ids) :]


def test_a_long_prompt_takes_one_step_per_chunk(runner: Runner, scheduler: Scheduler) -> None:
    item = generation("long", LONG)
    scheduler.add(item)
    for _ in range(PORTIONS - 1):
        runner.step(scheduler)
        assert item.output_ids == []
    runner.step(scheduler)
    assert len(item.output_ids) == 1
    run_to_end(runner, scheduler)
    assert item.output_ids == expected_ids(runner, item)


def test_a_long_prompt_follows_its_row_when_other_requests_end(runner: Runner, scheduler: Scheduler) -> None:
    first, long = generation("first", 5, tokens=50), generation("long", LONG)
    scheduler.add(first)
    runner.step(scheduler)
    scheduler.add(long)
    runner.step(scheduler)
    runner.step(scheduler)
    assert (scheduler.running.index(long), long.output_ids) == (1, [])
    scheduler.abort("first")
    assert scheduler.running.index(long) == 0
    run_to_end(runner, scheduler)
    assert long.output_ids == expected_ids(runner, long)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
def test_a_pause_during_a_long_prompt_changes_nothing(runner: Runner, scheduler: Scheduler, mode: PauseMode) -> None:
    item = generation("long", LONG)
    scheduler.add(item)
    runner.step(scheduler)
    scheduler.pause(mode)
    assert not scheduler.runnable
    # What another one leaves in the row must not be taken for its own.
    runner.model.extend([1] * PREFILL_PORTION, PREFILL_PORTION, 0, runner.cache)
    scheduler.resume()
    run_to_end(runner, scheduler)
    assert item.output_ids == expected_ids(runner, item)


def test_other_requests_wait_for_a_long_prompt_and_then_continue(runner: Runner, scheduler: Scheduler) -> None:
    other, long = generation("other", 5, tokens=8), generation("long", LONG)
    scheduler.add(other)
    runner.step(scheduler)
    scheduler.add(long)
    scheduler.add(late := generation("late", 7))
    run_to_end(runner, scheduler)
    for item in (other, long, late):
        assert item.output_ids == expected_ids(runner, item)


def test_the_engine_answers_while_a_long_prompt_is_computed(
    runner: Runner, scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, asked, step = threading.Event(), threading.Event(), runner.step

    def held_up(core: Scheduler) -> list[Generation]:
        """The first portion ends after somebody has asked."""
        began.set()
        assert asked.wait(60)
        return step(core)

    monkeypatch.setattr(runner, "step", held_up)
    thread = EngineThread(runner, scheduler)
    thread.start()
    try:
        item = generation("long", LONG)
        _, [answer] = thread.generate([item.prompt])
        assert began.wait(60)
        seen = thread.submit(lambda: tuple(len(each.output_ids) for each in scheduler.running))
        asked.set()
        assert seen.result(60) == (0,), "it runs, and has sampled nothing yet"
        answer.result(60)
    finally:
        asked.set()
        thread.stop()
