"""The ids of root spans and the links to them, over a whole simulated run in virtual time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import Link, SpanContext

from headrace.actors.evaluation.graders import evaluator
from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.rollouts import dispatcher, rollout, worker
from headrace.actors.simulation.virtual.plan import make_plan
from headrace.actors.simulation.virtual.simulate import run_plan
from headrace.actors.training import learner
from headrace.buffer.audit.evidence import Evidence, read_evidence
from headrace.sandboxes.pool import boot_spans
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.tracing import attempt_context, start_rollout_span
from support.recorded_spans import RUN_ID, RecordedSpans, attributes_of, parent_id, recorded_spans

# A simulated run without a directory has no identity.
NO_RUN = ""


def ids(context: SpanContext | None) -> tuple[int, int]:
    assert context is not None
    return context.trace_id, context.span_id


def named(link: Link) -> dict[str, object]:
    return dict(link.attributes or {})


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RecordedSpans, Evidence]]:
    """A run with failures, members that are carried over and evaluations."""
    folder = tmp_path_factory.mktemp("simulated") / "run"
    sizes = {"batch_size": 16, "group_size": 4, "slots": 16, "tasks": 64, "turns": 1, "steps": 11}
    changes = {"rule": "fraction(0.75)", "failure": 0.1, "evaluate_every": 5, "heldout": 6}
    modules = (worker, rollout, learner, dispatcher, evaluator, boot_spans)
    with pytest.MonkeyPatch.context() as patch, recorded_spans(patch, *modules, run_id=NO_RUN) as recorded:
        run_plan(make_plan("swe64", sizes | changes), folder)
        assert len(recorded.named(names.STEP)) == 11
        yield recorded, read_evidence(folder)


def roots_of(recorded: RecordedSpans) -> dict[tuple[str, int], ReadableSpan]:
    """The root spans by rollout and attempt."""
    spans = recorded.named(names.ROLLOUT)
    found = {}
    for span in spans:
        said = attributes_of(span)
        found[str(said[names.ROLLOUT_ID]), int(str(said[names.ATTEMPT]))] = span
    assert len(found) == len(spans), "one root an attempt"
    return found


def test_the_context_of_an_attempt_is_that_of_its_root_span(monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded_spans(monkeypatch) as recorded:
        root = start_rollout_span(recorded.tracer, "r", 2)
        recorded.tracer.start_span("unrelated").end()
        root.end()
        assert ids(root.get_span_context()) == ids(attempt_context(RUN_ID, "r", 2))
        assert ids(recorded.one("unrelated").context)[1] != root.get_span_context().span_id


def test_attempts_and_runs_have_roots_of_their_own() -> None:
    contexts = [attempt_context(run, "r", attempt) for run in ("a", "b") for attempt in (1, 2)]
    assert len({each.trace_id for each in contexts}) == len({each.span_id for each in contexts}) == 4
    assert all(each.is_valid and each.trace_flags.sampled for each in contexts)


def test_a_further_attempt_links_to_the_one_before(simulated: tuple[RecordedSpans, Evidence]) -> None:
    roots = roots_of(simulated[0])
    further = {key: span for key, span in roots.items() if key[1] > 1}
    assert further
    for (rollout_id, attempt), span in further.items():
        [link] = span.links
        assert ids(link.context) == ids(roots[rollout_id, attempt - 1].context)
        assert named(link) == {names.ROLLOUT_ID: rollout_id, names.ATTEMPT: attempt - 1}
    assert not any(span.links for key, span in roots.items() if key[1] == 1)


def test_a_step_links_to_its_members_with_their_staleness(simulated: tuple[RecordedSpans, Evidence]) -> None:
    recorded, evidence = simulated
    roots, batches = roots_of(recorded), {batch.batch_id: batch for batch in evidence.batches}
    steps = recorded.named(names.STEP)
    assert len(steps) == 11
    for step in steps:
        batch = batches[attributes_of(step)[names.STEP_BATCH]]
        members = [(member.rollout_id, member.attempt) for member in batch.members]
        assert [ids(link.context) for link in step.links] == [ids(roots[member].context) for member in members]
        assert [named(link)[names.STALENESS] for link in step.links] == [each.staleness for each in batch.members]
        assert parent_id(step) == 0


def test_the_link_to_a_carried_member_names_the_batch_of_its_group(simulated: tuple[RecordedSpans, Evidence]) -> None:
    recorded, evidence = simulated
    rollouts = {each.rollout_id: each for each in evidence.rollouts}
    carried = 0
    for step in recorded.named(names.STEP):
        for link in step.links:
            said = named(link)
            member = rollouts[said[names.ROLLOUT_ID]]
            others = {each.batch_id for each in evidence.rollouts if each.group_id == member.group_id} - {None}
            first, own = min(str(each) for each in others), attributes_of(step)[names.STEP_BATCH]
            expected = first if member.late and first != own else None
            assert said.get(names.GROUP_BATCH) == expected
            carried += expected is not None
    assert carried > 0


def test_an_evaluation_has_a_span_and_its_answers_carry_its_tag(simulated: tuple[RecordedSpans, Evidence]) -> None:
    recorded, evidence = simulated
    measured = {record["tag"]: record for record in read_metrics(evidence.run_dir / "metrics.jsonl", ("evaluation",))}
    evaluations = {str(attributes_of(span)[names.EVALUATION_TAG]): span for span in recorded.named(names.EVALUATION)}
    assert len(evaluations) >= 3
    answers = [span for span in roots_of(recorded).values() if attributes_of(span)[names.PURPOSE] == "evaluation"]
    assert {attributes_of(span)[names.EVALUATION_TAG] for span in answers} == set(evaluations)
    for tag, span in evaluations.items():
        said = attributes_of(span)
        assert (said[names.EVALUATION_TASKS], said[names.EVALUATION_ANSWERS]) == (6, 6)
        assert said[names.EVALUATION_SUCCESS] == measured[tag]["success"]
        versions = said[names.VERSIONS]
        assert isinstance(versions, tuple) and versions
    groups = {attributes_of(span).get(names.GROUP_ID) for span in roots_of(recorded).values() if span not in answers}
    assert groups <= {each.group_id for each in evidence.groups}


def test_a_failed_attempt_ends_as_an_error_with_its_cause(simulated: tuple[RecordedSpans, Evidence]) -> None:
    recorded, evidence = simulated
    causes = {(each.rollout_id, each.attempt): each.cause for each in evidence.attempts}
    infra = [span for key, span in roots_of(recorded).items() if causes.get(key) == "infra"]
    assert infra
    for span in infra:
        assert not span.status.is_ok
        assert attributes_of(span)[names.ERROR_TYPE] == "infra"
