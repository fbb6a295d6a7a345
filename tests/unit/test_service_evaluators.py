"""The evaluators `http` and `judge` against real servers: what is sent, what comes back, and what is no reward."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headrace.actors.errors import ConfigError
from headrace.actors.evaluation.by_service.judge import judge_prompt, last_score
from headrace.actors.evaluation.by_service.scoring import check_service_evaluators, refuse_unoffered, score_by_service
from headrace.actors.evaluation.graders.verdict import (
    NO_SANDBOX,
    Author,
    EpisodeRecord,
    EvaluationRequest,
    EvaluatorFault,
    SpokenPart,
    Verdict,
)
from headrace.actors.services.chat import ChatCall
from headrace.actors.services.clients import ServiceClients, refuse_silent_services
from headrace.actors.services.config import RetrySection, ServiceConfig, ServiceKind
from headrace.actors.services.service import NO_SERVICES, ServiceDown, Services
from headrace.buffer.errors import TaskFileError
from headrace.buffer.tasks.evaluators import HttpEvaluator, JudgeEvaluator
from headrace.buffer.tasks.parts import EnvironmentSpec, JudgeSpec
from headrace.buffer.tasks.task import Task, TaskId, load_tasks, task_digest, write_tasks
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.host.key_files import make_key, read_key
from support.scripted_service import ScriptedService, completion, cut_off, silent, text
from support.scripted_service import json as answer_with

PAGE = Path(__file__).resolve().parents[2] / "docs" / "services.md"
RECORD = EpisodeRecord(
    parts=(
        SpokenPart(source=Author.TASK, text="6 times 7?"),
        SpokenPart(
            source=Author.POLICY, text="Let me see.", calls=(ChatCall(id="1", name="run", arguments='{"a": 1}'),)
        ),
        SpokenPart(source=Author.ENVIRONMENT, text="a lone \ud800 surrogate"),
        SpokenPart(source=Author.POLICY, text="42"),
    ),
    artifacts={"note": "done"},
)


ASKED = HttpEvaluator(service="it", expected="42")
JUDGED = JudgeEvaluator(service="it", expected="42")


def task_with(spec: HttpEvaluator | JudgeEvaluator) -> Task:
    environment = EnvironmentSpec(kind="shell", given={"level": 3}, secret={"goal": "secret goal"})
    return Task(id=TaskId("one"), family="sums", instruction="6 times 7?", evaluator=spec, environment=environment)


REQUEST = EvaluationRequest(key="r1.0", task_id=TaskId("one"), sandbox=NO_SANDBOX, episode=RECORD)


async def score(spec: HttpEvaluator | JudgeEvaluator, services: Services, **changes: Any) -> Verdict:
    return await score_by_service(spec, task_with(spec), replace(REQUEST, **changes), services)


def prompt_of(spec: JudgeEvaluator = JUDGED, episode: EpisodeRecord = RECORD, **changes: Any) -> str:
    return judge_prompt(spec, task_with(spec), replace(REQUEST, **changes), episode)


def config_of(url: str, kind: ServiceKind, **more: Any) -> ServiceConfig:
    return ServiceConfig(kind=kind, url=url, retry=RetrySection(attempts=2, total_s=20.0), **more)


@asynccontextmanager
async def clients_of(service: ScriptedService, kind: ServiceKind, **more: Any) -> AsyncIterator[ServiceClients]:
    async with service.served() as url, ServiceClients({"it": config_of(url, kind, **more)}) as clients:
        yield clients


async def scored(service: ScriptedService, **more: Any) -> Verdict:
    async with clients_of(service, ServiceKind.REWARD, **more) as clients:
        return await score(ASKED, clients)


async def judged(service: ScriptedService, judge: JudgeSpec | None = None, **more: Any) -> Verdict:
    async with clients_of(service, ServiceKind.MODEL) as clients:
        spec = replace(JUDGED, judge=judge or JudgeSpec())
        return await score(spec, clients, **more)


def reward_server_of_the_page() -> web.Application:
    """The server that docs/services.md shows."""
    names: dict[str, Any] = {"__name__": "reward_server"}
    exec(compile(PAGE.read_text().split("```python\n")[1].split("```")[0], str(PAGE), "exec"), names)
    app: web.Application = names["app"]
    return app


async def test_the_reward_server_of_the_page_works() -> None:
    async with TestServer(reward_server_of_the_page()) as server:
        configs = {"it": config_of(str(server.make_url("/score")), ServiceKind.REWARD)}
        await refuse_silent_services(configs)
        wrong = {"it": config_of(str(server.make_url("/scroe")), ServiceKind.REWARD)}
        with pytest.raises(ConfigError, match=r"service it: .*/scroe answered GET with 404.*correct services\.it\.url"):
            await refuse_silent_services(wrong)
        async with ServiceClients(configs) as clients:
            right = await score(ASKED, clients)
            other = replace(ASKED, expected="43")
            false = await score(other, clients)
    assert (right.reward, right.solved, right.cause) == (1.0, True, Cause.SOLVED)
    assert (false.reward, false.solved, false.cause) == (0.0, False, Cause.FAILED)
    assert "42" in right.detail


async def test_the_server_gets_the_record_and_nothing_secret(tmp_path: Path) -> None:
    make_key(tmp_path / "key")
    service = ScriptedService(answer_with({"reward": 0.25, "solved": True, "detail": "close"}))
    verdict = await scored(service, key_file=tmp_path / "key")
    assert (verdict.reward, verdict.solved, verdict.detail) == (0.25, True, "close")
    [sent] = service.requests
    assert service.headers[0]["Authorization"] == f"Bearer {read_key(tmp_path / 'key', 'key')}"
    assert sent["key"] == "r1.0"
    assert sent["task"] == {
        "id": "one",
        "family": "sums",
        "instruction": "6 times 7?",
        "messages": [],
        "given": {"level": 3},
        "expected": "42",
    }
    assert sent["episode"]["artifacts"] == {"note": "done"}
    assert sent["episode"]["parts"][1] == {
        "source": "policy",
        "text": "Let me see.",
        "calls": [{"name": "run", "arguments": '{"a": 1}'}],
    }
    assert sent["episode"]["parts"][2]["text"] == "a lone ? surrogate"
    assert "hidden text" not in str(sent)
    assert "secret goal" not in str(sent)


@pytest.mark.parametrize("fault", [answer_with({}, 502), answer_with({}, 503), cut_off, text("<html>"), text("[]")])
async def test_a_fault_that_passes_is_tried_again_with_the_same_key(fault: Any) -> None:
    service = ScriptedService(fault, answer_with({"reward": -2.5}))
    verdict = await scored(service)
    assert (verdict.reward, verdict.solved) == (-2.5, False)
    assert [sent["key"] for sent in service.requests] == ["r1.0", "r1.0"]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (answer_with({}, 502), "answered 502"),
        (silent, r"no answer within 0\.3 s"),
        (cut_off, "ClientPayloadError"),
        (text("I would say 0.5"), "not valid JSON"),
        (text('{"reward": NaN}'), "not valid JSON"),
        (answer_with({"score": 1}), "the answer is not an object with reward"),
        (answer_with([1.0]), "the answer is not an object with reward"),
        (answer_with({"error": "no such task"}, 404), "answered 404: .*no such task"),
    ],
    ids=["502", "hang", "lost-answer", "text", "nan", "no-reward", "list", "404"],
)
async def test_a_server_that_is_down_slow_or_unreadable_is_an_outage(fault: Any, says: str) -> None:
    with pytest.raises(ServiceDown, match=says):
        await scored(ScriptedService(fault), timeout_s=0.3)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({"reward": "high"}, r"service it: evaluator error: the reward is not a number \(str\)"),
        ({"reward": None}, "not a number"),
        ({"reward": 1e7}, "not a finite number from"),
        ({"reward": 1.0, "solved": "yes"}, "`solved` that is no boolean"),
        ({"reward": 1.0, "detail": 3}, "`detail` that is no text"),
        ({"reward": 1.0, "solve": True}, "returned the keys"),
    ],
)
async def test_a_reward_that_is_none_is_the_evaluators_fault(answer: Mapping[str, Any], says: str) -> None:
    service = ScriptedService(answer_with(answer))
    verdict = await scored(service)
    assert (verdict.reward, verdict.cause) == (None, Cause.EVALUATOR)
    assert re.search(says, verdict.detail), verdict.detail
    assert len(service.requests) == 1, "another request would get the same"


async def test_an_agent_without_a_record_is_no_reward() -> None:
    for spec in (ASKED, JUDGED):
        verdict = await score(spec, NO_SERVICES, episode=None)
        assert (verdict.reward, verdict.cause) == (None, Cause.EVALUATOR)


async def test_a_server_without_get_is_accepted_at_start() -> None:
    """Python's http.server answers 501, and web frameworks answer 405."""
    for status in (405, 501):
        async with ScriptedService(answer_with({}, status)).served() as url:
            await refuse_silent_services({"it": config_of(f"{url}/score", ServiceKind.REWARD)})
    async with ScriptedService(answer_with({}, 502)).served() as url:
        with pytest.raises(ConfigError, match="service it does not answer at"):
            await refuse_silent_services({"it": config_of(url, ServiceKind.REWARD)})


@pytest.mark.parametrize(
    ("said", "score"),
    [
        (r"good: \boxed{1}", 1.0),
        (r"the agent claims \boxed{1}, but \boxed{ 0.25 }", 0.25),
        (r"\boxed{+.5}", None),
        (r"\boxed{2}", None),
        (r"\boxed{-0.1}", None),
        (r"\boxed{nan}", None),
        ("1", None),
    ],
)
def test_the_last_number_in_range_is_the_score(said: str, score: float | None) -> None:
    assert last_score(said, 0.0, 1.0) == score


def boxed(number: object) -> Any:
    return answer_with(completion(rf"So \boxed{{{number}}}"))


async def test_votes_are_averaged_and_lost_ones_are_missing() -> None:
    """F22: a vote that is lost or unusable is not a vote of 0."""
    service = ScriptedService(boxed(1), answer_with(completion("no idea")), answer_with({}, 400), boxed(0.5))
    verdict = await judged(service, JudgeSpec(votes=4), keep=True)
    assert (verdict.reward, verdict.solved) == (0.75, True)
    assert verdict.detail == "judge 0.75 over 2 of 4 votes"
    assert "no idea" in verdict.log
    assert len({sent["seed"] for sent in service.requests}) == 4
    assert all(sent["temperature"] == 1.0 for sent in service.requests)


@pytest.mark.parametrize(("solved_at", "solved"), [(None, False), (2.0, True), (2.5, False)])
async def test_one_score_in_a_range_with_a_threshold(solved_at: float | None, solved: bool) -> None:
    judge = JudgeSpec(votes=1, lowest=0.0, highest=10.0, solved_at=solved_at)
    verdict = await judged(ScriptedService(boxed(2)), judge)
    assert (verdict.reward, verdict.solved, verdict.log) == (2.0, solved, "")


async def test_votes_of_which_none_is_usable_are_the_evaluators_fault() -> None:
    verdict = await judged(ScriptedService(answer_with({}, 400), answer_with(completion("\\boxed{7}"))))
    assert (verdict.reward, verdict.cause) == (None, Cause.EVALUATOR)
    assert r"no vote of 3 has a number from 0 to 1 in \boxed{} (1 lost)" in verdict.detail


async def test_a_judge_that_is_down_is_an_outage() -> None:
    with pytest.raises(ServiceDown, match="answered 400"):
        await judged(ScriptedService(answer_with({}, 400)))


def test_the_prompt_has_borders_that_the_agent_cannot_write() -> None:
    prompt = prompt_of()
    assert "6 times 7?" in prompt
    assert 'run {"a": 1}' in prompt
    assert "# Expected result\n42" in prompt
    assert "from 0 (not at all) to 1 (completely)" in prompt
    border = prompt.split("# Conversation\n--- ")[1].split(" task ---")[0]
    assert [line for line in prompt.splitlines() if border in line] == [
        f"--- {border} {author} ---" for author in ("task", "agent", "environment", "agent", "end")
    ]
    assert border not in prompt_of(key="r2.0")
    assert "Expected" not in prompt_of(JudgeEvaluator(service="it"))
    cut = prompt_of(replace(JUDGED, judge=JudgeSpec(characters=60)))
    assert "(the beginning is left out)" in cut
    assert "Let me see." not in cut
    own = prompt_of(replace(JUDGED, judge=JudgeSpec(template="{{ artifacts.note }}: {{ highest }}")))
    assert own == "done: 1"
    with pytest.raises(EvaluatorFault, match=r"evaluator\.judge\.template: .*no attribute 'absent'"):
        prompt_of(replace(JUDGED, judge=JudgeSpec(template="{{ artifacts.absent }}")))


def test_text_of_the_agent_is_not_a_template() -> None:
    episode = EpisodeRecord(parts=(SpokenPart(source=Author.POLICY, text="{{ expected }}"),))
    assert "{{ expected }}" in prompt_of(episode=episode)


def task_of(evaluator: Mapping[str, Any], folder: Path, **fields: Any) -> Task:
    path = folder / "tasks.jsonl"
    path.write_text(json.dumps({"id": "one", "family": "f", "instruction": "i", "evaluator": evaluator, **fields}))
    return load_tasks(path)[0]


HTTP = {"kind": "http", "service": "it"}
JUDGE = {"kind": "judge", "service": "it"}


def test_tasks_are_written_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Rate {{ conversation }}")
    for evaluator in (
        HTTP | {"expected": "42"},
        JUDGE,
        JUDGE | {"judge": {"votes": 1, "highest": 10.0, "template": {"file": "prompt.txt"}}},
        {"kind": "sum", "parts": [{"name": "a", "evaluator": HTTP}, {"name": "b", "evaluator": JUDGE}]},
    ):
        task = task_of(evaluator, tmp_path)
        write_tasks(tmp_path / "copy.jsonl", [task])
        [again] = load_tasks(tmp_path / "copy.jsonl")
        assert (again, task_digest(again)) == (task, task_digest(task))
    assert task_of(JUDGE | {"judge": {"template": {"file": "prompt.txt"}}}, tmp_path).evaluator.judge == JudgeSpec(
        template="Rate {{ conversation }}"
    )


@pytest.mark.parametrize(
    ("evaluator", "says"),
    [
        ({"kind": "http"}, "evaluator.service: is missing; add it"),
        ({"kind": "judge", "service": ""}, "evaluator.service: is empty"),
        ({"kind": "none", "service": "it"}, "evaluator.service: unknown field of the kind none"),
        (HTTP | {"judge": {}}, "evaluator.judge: unknown field of the kind http; remove it"),
        (HTTP | {"check": "x"}, "evaluator.check: unknown field of the kind http; remove it"),
        (JUDGE | {"judge": {"votes": 0}}, "evaluator.judge.votes: 0 must be at least 1"),
        (JUDGE | {"judge": {"lowest": 1.0}}, "evaluator.judge.lowest: must satisfy"),
        (JUDGE | {"judge": {"solved_at": 2.0}}, "evaluator.judge.solved_at: 2 must be above lowest (0)"),
        (JUDGE | {"judge": {"temperature": -1.0}}, "evaluator.judge.temperature: -1.0 must be a number from 0"),
        (JUDGE | {"judge": {"template": {"file": "absent"}}}, "evaluator.judge.template: cannot read"),
        (JUDGE | {"judge": {"vote": 1}}, "evaluator.judge.vote: unknown field"),
    ],
)
def test_a_task_that_cannot_work_is_refused(tmp_path: Path, evaluator: Mapping[str, Any], says: str) -> None:
    with pytest.raises(TaskFileError) as refused:
        task_of(evaluator, tmp_path)
    assert says in str(refused.value)


class Grader:
    """A reward server of another package."""

    async def score(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"reward": len(document["episode"]["parts"])}


REWARD = ServiceConfig(kind=ServiceKind.REWARD, url="http://127.0.0.1:9/score")
MODEL = ServiceConfig(kind=ServiceKind.MODEL, url="http://127.0.0.1:9")
OUTSIDE = ServiceConfig(kind=f"{__name__}:Grader")
SLOW = REWARD.model_copy(update={"retry": RetrySection(total_s=90.0)})


@pytest.mark.parametrize(
    ("evaluator", "services", "says"),
    [
        (HTTP, {}, "services.it is missing; task one (evaluator.kind http) needs it; add the table"),
        (HTTP, {"it": MODEL}, "services.it.kind is model; task one (evaluator.kind http) needs it as a reward"),
        (JUDGE, {"it": REWARD}, "services.it.kind is reward; task one (evaluator.kind judge) needs it as a model"),
        (JUDGE, {"it": OUTSIDE}, "Grader has no method 'complete', which task one (evaluator.kind judge) needs"),
        (HTTP, {"it": SLOW}, "services.it.retry.total_s 90 is not below the 90 s that the evaluation of task one"),
        (JUDGE | {"judge": {"template": "{{ answer }}"}}, {"it": MODEL}, "unknown name answer in the template"),
        (JUDGE | {"judge": {"template": "{{"}}, {"it": MODEL}, "task one: evaluator.judge.template: not a valid Jinja"),
    ],
)
def test_a_task_whose_service_cannot_score_it_is_refused_before_anything_starts(
    tmp_path: Path, evaluator: Mapping[str, Any], services: Mapping[str, ServiceConfig], says: str
) -> None:
    task = task_of({"kind": "sum", "parts": [{"name": "a", "evaluator": evaluator}]}, tmp_path)
    with pytest.raises(ConfigError) as refused:
        refuse_unoffered(check_service_evaluators([task], services, 90.0), services)
    assert says in str(refused.value)


def test_a_number_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    task = task_of(HTTP, tmp_path, environment={"kind": "shell", "given": {"n": 1 << 70}})
    with pytest.raises(ConfigError, match=r"task one: environment\.given cannot be sent as JSON"):
        check_service_evaluators([task], {"it": REWARD}, 90.0)


async def test_a_reward_server_of_another_package_scores() -> None:
    services = {"it": OUTSIDE}
    refuse_unoffered(check_service_evaluators([task_with(ASKED)], services, 90.0), services)
    async with ServiceClients({"it": OUTSIDE}) as clients:
        verdict = await score(ASKED, clients)
        assert clients.figures()["it"].totals.calls == 1
    assert verdict.reward == 4.0
