"""Each kind of terminal task in real sandboxes: look, act, and a verdict that comes from clean sandboxes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.actors.agents.programs.agent import AgentSession, StopReason
from headrace.actors.agents.registry.config import ShellAgentConfig
from headrace.actors.agents.registry.registry import shell_agent
from headrace.actors.evaluation.graders.evaluation import EvaluationRequest, Verdict, evaluate
from headrace.actors.services.chat import PLAIN, ChatMessage, ChatOptions, ChatReply
from headrace.buffer.tasks.datasets.terminal import Kind, Problem, Split, problems
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider
from support.clean_sandboxes import CleanSandboxes

pytestmark = pytest.mark.namespaces
PROBLEMS = problems(1, len(Kind), Split.HELD_OUT)


class Script:
    """A policy that gives these answers."""

    def __init__(self, answers: Sequence[str]) -> None:
        self._answers = iter(answers)
        self.seen: list[str] = []

    async def __call__(self, messages: Sequence[ChatMessage], options: ChatOptions = PLAIN) -> ChatReply:
        self.seen.append(messages[-1].content)
        return ChatReply(text=next(self._answers), finish_reason="stop")

    async def count(self, messages: Sequence[ChatMessage]) -> int:
        return sum(len(message.content) for message in messages)


async def work(problem: Problem, *commands: str) -> tuple[list[str], Verdict]:
    """What the agent was shown when it gave these commands, and the verdict."""
    task, chat = problem.task(), Script(commands)

    async with LocalProvider() as provider:
        ref = await provider.create(SandboxSpec(image=task.image))
        sandbox = await provider.attach(ref)
        await sandbox.write_many({path: text.encode() for path, text in task.files.items()})
        session = AgentSession(base_url="", chat=chat)
        report = await shell_agent(ShellAgentConfig()).run(session=session, sandbox=sandbox, task=task)
        assert report.stop is StopReason.FINISHED
        verdict = await evaluate(
            task, EvaluationRequest(key="1", task_id=task.id, sandbox=ref), CleanSandboxes(provider, sandbox)
        )
        await sandbox.kill()
    return chat.seen, verdict


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.kind)
async def test_acting_on_what_was_looked_up_solves_the_task(problem: Problem) -> None:
    seen, verdict = await work(problem, problem.look, problem.act(problem.finding))
    assert seen == [problem.instruction, problem.shown]
    assert (verdict.reward, verdict.cause) == (1.0, Cause.SOLVED)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.kind)
async def test_looking_in_the_wrong_place_does_not_solve_the_task(problem: Problem) -> None:
    command, shown, finding = problem.stray
    seen, verdict = await work(problem, command, problem.act(finding))
    assert seen == [problem.instruction, shown[: ShellAgentConfig().max_observation_bytes].rstrip("\n")]
    assert (verdict.reward, verdict.cause) == (0.0, Cause.FAILED)


async def test_the_agents_code_cannot_stop_the_check() -> None:
    problem = next(problem for problem in PROBLEMS if problem.kind is Kind.REPAIR)
    _, verdict = await work(problem, "echo 'import os; os._exit(0)' > calc.py; exit")
    assert (verdict.reward, verdict.cause) == (0.0, Cause.INVALID)
