"""The evaluators `http`, a server of the user that scores the record of an episode, and `judge`: their checks at start,
and the choice between them.

Invariants:
- Hidden files, checks, the environment's secret and paths of this machine are never sent to a server; `expected` is,
  since it is written for the server. A request that is sent again after a lost answer has the same key.
- A service that is down, too slow or unreadable raises ServiceDown, which is infra; an answer that is no valid reward
  is the evaluator's fault. Neither has a reward.
- They run in the worker, whose services they call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import orjson

from headrace.actors.errors import ConfigError
from headrace.actors.evaluation.by_service.judge import NAMES, score_by_votes
from headrace.actors.evaluation.graders.functions import document_of
from headrace.actors.evaluation.graders.verdict import (
    EpisodeRecord,
    EvaluationRequest,
    EvaluatorFault,
    Verdict,
    broken,
    rewarded_by,
)
from headrace.actors.services.calls import ServiceCalls
from headrace.actors.services.clients import make_service, refuse_missing_services
from headrace.actors.services.config import ServiceConfig, ServiceKind
from headrace.actors.services.registry import METHODS, OutsideService
from headrace.actors.services.service import RewardServer, Services
from headrace.actors.services.templates import check_names
from headrace.buffer.tasks.evaluators import OF_SERVICES, HttpEvaluator, JudgeEvaluator
from headrace.buffer.tasks.parts import least
from headrace.buffer.tasks.task import Task
from headrace.buffer.trajectories.sanitizer import clean_text, without_surrogates

ServiceUsers: TypeAlias = dict[tuple[str, ServiceKind], str]
"""The first task that uses each service in each of its roles."""


def check_service_evaluators(
    tasks: Iterable[Task], services: Mapping[str, ServiceConfig], evaluate_timeout_s: float
) -> ServiceUsers:
    """Check that the services and templates of all tasks exist and fit, before anything starts, and return who uses
    them. Raises ConfigError."""
    users: ServiceUsers = {}
    for task in tasks:
        for spec in task.evaluators:
            if not isinstance(spec, OF_SERVICES):
                continue
            kind = ServiceKind.REWARD if isinstance(spec, HttpEvaluator) else ServiceKind.MODEL
            user = f"task {task.id} (evaluator.kind {spec.kind})"
            users.setdefault((spec.service, kind), user)
            refuse_missing_services((spec.service,), services, kind=kind, user=user)
            total_s = services[spec.service].retry.total_s
            evaluate_s = least(evaluate_timeout_s, task.limits.evaluate_s) or evaluate_timeout_s
            if total_s >= evaluate_s:
                raise ConfigError(
                    f"services.{spec.service}.retry.total_s {total_s:g} is not below the {evaluate_s:g} s that the "
                    f"evaluation of {user} may take; lower it, or raise rollout.evaluate_timeout_s"
                )
            try:
                orjson.dumps(shown_task(task, spec.expected))
            except TypeError as error:
                raise ConfigError(f"task {task.id}: environment.given cannot be sent as JSON: {error}") from error
            try:
                check_names(spec.judge.template if isinstance(spec, JudgeEvaluator) else "", NAMES)
            except ValueError as error:
                raise ConfigError(f"task {task.id}: evaluator.judge.template: {error}") from error
    return users


def refuse_unoffered(users: ServiceUsers, services: Mapping[str, ServiceConfig]) -> None:
    """Raise ConfigError if a service of another package lacks the method that its user needs."""
    for (name, kind), user in users.items():
        if not services[name].is_outside:
            continue
        # Created once, since a class of another package may be expensive.
        service = make_service(name, services[name], ServiceCalls(name, services[name]), None)
        if isinstance(service, OutsideService) and not service.offers(kind):
            raise ConfigError(
                f"services.{name}.kind: {services[name].kind} has no method {METHODS[kind]!r}, which {user} needs "
                "(guide 'Services')"
            )


async def score_by_service(
    spec: HttpEvaluator | JudgeEvaluator, task: Task, request: EvaluationRequest, services: Services
) -> Verdict:
    """Score a rollout by a service. Raises ServiceDown."""
    if request.episode is None:
        return broken(f"the evaluator `{spec.kind}` needs the record of a loop agent; set agent.kind to loop")
    try:
        if isinstance(spec, HttpEvaluator):
            return await score_by_server(spec, task, request, request.episode, services.reward(spec.service))
        return await score_by_votes(spec, task, request, request.episode, services.model(spec.service))
    except EvaluatorFault as error:
        return broken(clean_text(f"service {spec.service}: {error}"))


async def score_by_server(
    spec: HttpEvaluator, task: Task, request: EvaluationRequest, episode: EpisodeRecord, server: RewardServer
) -> Verdict:
    """Return the verdict of a reward server. Raises ServiceDown, EvaluatorFault."""
    document = {
        "key": request.key,
        "task": shown_task(task, spec.expected),
        "episode": without_surrogates(document_of(episode)),
    }
    return rewarded_by(await server.score(document))


def shown_task(task: Task, expected: str) -> dict[str, Any]:
    """Return the parts of a task that a reward server gets."""
    return {
        "id": task.id,
        "family": task.family,
        "instruction": task.instruction,
        "messages": [{"role": message.role, "content": message.content} for message in task.messages],
        "given": dict(task.environment.given) if task.environment is not None else {},
        "expected": expected,
    }
