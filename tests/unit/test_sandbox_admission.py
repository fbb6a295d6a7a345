"""Pure parts of the admission: places, token bucket, circuit breaker, bounded queue, and the retry table."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tenacity import Future, RetryCallState

from headrace.buffer.primitives.circuit_breaker import BreakerState, CircuitBreaker
from headrace.sandboxes import errors
from headrace.sandboxes.errors import (
    BootFailed,
    BootTimeout,
    CapacityExceeded,
    ImageUnknown,
    LauncherGone,
    ProviderUnreachable,
    RateLimited,
    SandboxError,
)
from headrace.sandboxes.pool import admission as admission_module
from headrace.sandboxes.pool.admission import Admission, AdmissionConfig, TokenBucket
from headrace.sandboxes.pool.slots import Priority, Slots, Ticket
from headrace.sandboxes.retry import FullJitter, RetryConfig, is_ambiguous, is_transient, retrying

PRIORITIES = list(Priority)


class NumberedAdmission:
    """An admission whose tickets are numbered."""

    def __init__(self, **settings: float) -> None:
        defaults = {"max_live": 4, "boot_concurrency": 2, "evaluation_reserve": 1, "boots_per_s": 1000, "burst": 1000}
        self.core = Admission(AdmissionConfig.model_validate({**defaults, **settings}))
        self.number = 0

    def enqueue(self, priority: Priority = Priority.ROLLOUT, now: float = 0.0) -> Ticket:
        self.number += 1
        ticket = Ticket(priority, self.number)
        self.core.enqueue(ticket, now)
        return ticket


def test_admission_grants_in_order_up_to_the_boot_concurrency() -> None:
    admission = NumberedAdmission()
    tickets = [admission.enqueue() for _ in range(3)]
    assert admission.core.grant(0) == tickets[:2]
    assert (admission.core.waiting, admission.core.booting, admission.core.live) == (1, 2, 0)
    admission.core.booted(tickets[0])
    assert admission.core.grant(0) == tickets[2:]


def test_evaluations_go_first_and_have_reserved_slots() -> None:
    admission = NumberedAdmission(max_live=2)
    first, second = admission.enqueue(), admission.enqueue()
    assert admission.core.grant(0) == [first]
    admission.core.booted(first)
    assert admission.core.grant(0) == []
    evaluation = admission.enqueue(Priority.EVALUATION)
    assert admission.core.grant(0) == [evaluation]
    admission.core.leave(first)
    assert admission.core.grant(0) == []
    admission.core.leave(evaluation)
    assert admission.core.grant(0) == [second]


def test_held_out_tasks_overtake_the_queue_without_reserved_slots() -> None:
    admission = NumberedAdmission(max_live=2)
    running, queued = admission.enqueue(), admission.enqueue()
    assert admission.core.grant(0) == [running]
    admission.core.booted(running)
    held_out = admission.enqueue(Priority.HELD_OUT)
    assert admission.core.grant(0) == [], "the last place is for evaluations of what runs"
    admission.core.leave(running)
    assert admission.core.grant(0) == [held_out]
    admission.core.leave(held_out)
    assert admission.core.grant(0) == [queued]


def test_a_large_evaluation_leaves_boots_for_training() -> None:
    """The evaluation arrives first, with more requests than there are places."""
    admission = NumberedAdmission(max_live=24, boot_concurrency=8, evaluation_reserve=4, held_out_share=0.5)
    held_out = [admission.enqueue(Priority.HELD_OUT) for _ in range(40)]
    training = [admission.enqueue() for _ in range(10)]
    booted: list[Ticket] = []
    for _ in range(4):
        granted = admission.core.grant(0)
        for ticket in granted:
            admission.core.booted(ticket)
        booted += granted
    assert booted[:8] == [*held_out[:4], *training[:4]]
    assert booted == [*held_out[:4], *training[:4], *held_out[4:8], *training[4:8], *held_out[8:10], *training[8:]]


def test_the_boots_of_checks_leave_training_its_share_of_the_others() -> None:
    admission = NumberedAdmission(max_live=24, boot_concurrency=8, evaluation_reserve=4, held_out_share=0.5)
    held_out = [admission.enqueue(Priority.HELD_OUT) for _ in range(20)]
    training = [admission.enqueue() for _ in range(10)]
    checks = [admission.enqueue(Priority.EVALUATION) for _ in range(4)]
    assert admission.core.grant(0) == [*checks, *held_out[:2], *training[:2]]


def test_an_evaluation_takes_all_slots_when_nothing_else_is_waiting() -> None:
    admission = NumberedAdmission(max_live=12, boot_concurrency=8, evaluation_reserve=4, held_out_share=0.25)
    held_out = [admission.enqueue(Priority.HELD_OUT) for _ in range(20)]
    assert admission.core.grant(0) == held_out[:8]


def test_a_small_share_is_at_least_one_slot() -> None:
    admission = NumberedAdmission(max_live=3, boot_concurrency=1, evaluation_reserve=1, held_out_share=0.01)
    training, held_out = [admission.enqueue() for _ in range(5)], admission.enqueue(Priority.HELD_OUT)
    assert admission.core.grant(0) == [held_out]
    admission.core.booted(held_out)
    assert admission.core.grant(0) == training[:1]


def test_warm_sandboxes_go_last() -> None:
    admission = NumberedAdmission(boot_concurrency=1)
    warm, rollout = admission.enqueue(Priority.WARM), admission.enqueue()
    assert admission.core.grant(0) == [rollout]
    admission.core.booted(rollout)
    assert admission.core.grant(0) == [warm]


def test_a_retry_goes_before_later_requests() -> None:
    admission = NumberedAdmission(boot_concurrency=1)
    first, second = admission.enqueue(), admission.enqueue()
    assert admission.core.grant(0) == [first]
    admission.core.failed(first, BootFailed("x"), 0)
    admission.core.enqueue(first, 0, again=True)
    assert admission.core.grant(0) == [first]
    admission.core.booted(first)
    assert admission.core.grant(0) == [second]


def test_a_withdrawn_ticket_is_never_granted() -> None:
    admission = NumberedAdmission()
    admission.core.leave(admission.enqueue())
    assert admission.core.grant(0) == []
    assert admission.core.waiting == 0


def test_a_full_queue_refuses_at_once_with_a_retry_delay() -> None:
    admission = NumberedAdmission(max_waiting=3, boots_per_s=0.5, burst=1)
    tickets = [admission.enqueue() for _ in range(3)]
    with pytest.raises(CapacityExceeded, match="max_waiting=3") as refusal:
        admission.enqueue()
    assert refusal.value.retry_after_s == 3 / 0.5
    admission.core.leave(tickets[0])
    admission.enqueue()
    admission.core.enqueue(tickets[0], 0, again=True)
    assert admission.core.waiting == 4


def test_each_boot_attempt_takes_a_token_from_the_bucket() -> None:
    admission = NumberedAdmission(boots_per_s=2, burst=1)
    first, second = admission.enqueue(), admission.enqueue()
    assert admission.core.grant(0) == [first]
    assert admission.core.next_grant_s(0) == pytest.approx(0.5)
    admission.core.failed(first, BootFailed("x"), 0.1)
    admission.core.enqueue(first, 0.1, again=True)
    assert admission.core.grant(0.4) == []
    assert admission.core.grant(0.5) == [first]
    assert admission.core.grant(1.0) == [second]


def test_load_shedding_and_refusals_do_not_open_the_breaker() -> None:
    admission = NumberedAdmission(breaker_failures=2)
    for error in (RateLimited("429"), CapacityExceeded("full"), ImageUnknown("x"), RateLimited("429")) * 2:
        ticket = admission.enqueue()
        assert admission.core.grant(0) == [ticket]
        admission.core.failed(ticket, error, 0)
    assert admission.core.breaker(0) is BreakerState.CLOSED


def test_a_failing_host_recovers_after_one_successful_probe() -> None:
    admission = NumberedAdmission(breaker_failures=2, breaker_open_s=5)
    for _ in range(2):
        ticket = admission.enqueue()
        assert admission.core.grant(0) == [ticket]
        admission.core.failed(ticket, ProviderUnreachable("502"), 0)
    first, second = admission.enqueue(), admission.enqueue()
    assert admission.core.grant(4.9) == []
    assert admission.core.next_grant_s(1) == pytest.approx(4)
    assert admission.core.grant(5) == [first]
    admission.core.failed(first, LauncherGone("x"), 6)
    assert admission.core.breaker(10.9) is BreakerState.OPEN
    assert admission.core.grant(11) == [second]
    third = admission.enqueue()
    assert admission.core.grant(11) == []
    admission.core.booted(second)
    assert admission.core.grant(11) == [third]


def test_an_abandoned_probe_allows_the_next() -> None:
    breaker = CircuitBreaker(1, 1.0)
    breaker.failed(0, "a")
    breaker.begin(1, "b")
    assert not breaker.allows(1)
    breaker.ended("b")
    assert breaker.allows(1)


@given(st.lists(st.tuples(st.sampled_from(["begin", "succeed", "fail", "end", "wait"]), st.integers(0, 20))))
def test_a_half_open_breaker_allows_one_probe_and_an_open_one_none(steps: list[tuple[str, int]]) -> None:
    breaker, now, running, calls = CircuitBreaker(3, 10.0), 0.0, list[int](), 0
    since_not_closed: set[int] = set()
    for action, number in steps:
        if action == "wait":
            now += number
        elif action == "begin" and breaker.allows(now):
            assert breaker.state(now) is not BreakerState.OPEN
            breaker.begin(now, calls)
            running.append(calls)
            if breaker.state(now) is BreakerState.HALF_OPEN:
                since_not_closed.add(calls)
            calls += 1
        elif running and action in ("succeed", "fail", "end"):
            call = running.pop(number % len(running))
            if action == "succeed":
                breaker.succeeded(call)
            elif action == "fail":
                breaker.failed(now, call)
            breaker.ended(call)
        since_not_closed &= set(running)
        if breaker.state(now) is BreakerState.CLOSED:
            since_not_closed.clear()
        assert len(since_not_closed) <= 1


@given(
    rate=st.floats(0.5, 100),
    burst=st.integers(1, 20),
    steps=st.lists(st.floats(0, 3), max_size=80),
    span_s=st.floats(0.1, 5),
)
def test_tokens_taken_in_any_period_are_bounded_by_burst_and_rate(
    rate: float, burst: int, steps: list[float], span_s: float
) -> None:
    bucket, now, taken = TokenBucket(rate, burst), 0.0, list[float]()
    for step in steps:
        now += step
        while bucket.take(now):
            taken.append(now)
    for start in taken:
        assert sum(start <= at <= start + span_s for at in taken) <= burst + rate * (span_s + 1e-5)


@given(rate=st.floats(0.01, 1e4), start=st.floats(0, 1e7), drained=st.integers(1, 5))
def test_a_token_is_available_at_the_announced_time(rate: float, start: float, drained: int) -> None:
    bucket, now = TokenBucket(rate, drained), start
    for _ in range(drained):
        assert bucket.take(now)
    for _ in range(3):
        now += bucket.next_s(now)
        assert bucket.take(now)


@given(steps=st.lists(st.tuples(st.sampled_from(["ask", "start", "booted", "leave"]), st.integers(0, 30))))
def test_slots_in_use_never_exceed_their_limits(steps: list[tuple[str, int]]) -> None:
    places = Slots(max_live=5, boot_concurrency=2, evaluation_reserve=2)
    booting: list[Ticket] = []
    taken: set[Ticket] = set()
    known: list[Ticket] = []
    for action, number in steps:
        if action == "ask":
            known.append(Ticket(PRIORITIES[number % 3], len(known)))
            places.enqueue(known[-1])
        elif action == "start" and (ticket := places.next()) is not None:
            places.start(ticket)
            booting.append(ticket)
            taken.add(ticket)
        elif action == "booted" and booting:
            places.booted(booting.pop(number % len(booting)))
        elif action == "leave" and known:
            ticket = known[number % len(known)]
            places.leave(ticket)
            taken.discard(ticket)
            booting = [other for other in booting if other != ticket]
        assert places.booting <= 2
        assert places.booting + places.live == len(taken) <= 5
        assert sum(ticket.priority is not Priority.EVALUATION for ticket in taken) <= 3


def test_a_reserve_that_leaves_no_slot_is_refused() -> None:
    with pytest.raises(ValidationError, match="evaluation_reserve=4"):
        AdmissionConfig(max_live=4, evaluation_reserve=4)


def test_the_retry_table_covers_every_error() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, SandboxError)]
    for kind in kinds:
        if kind is SandboxError:
            continue
        assert is_transient(kind("x")) == kind.transient
    assert is_ambiguous(ProviderUnreachable("502"))
    assert is_ambiguous(BootTimeout("late"))
    assert is_ambiguous(asyncio.CancelledError())
    assert not is_ambiguous(RateLimited("429"))
    assert not is_ambiguous(ImageUnknown("x"))


def state_after(error: SandboxError, attempt: int) -> RetryCallState:
    state = RetryCallState(retrying(RetryConfig()), None, (), {})
    state.attempt_number = attempt
    state.outcome = Future.construct(attempt, error, has_exception=True)
    return state


@given(attempt=st.integers(1, 30), retry_after_s=st.floats(0, 100))
def test_waits_are_jittered_bounded_and_never_shorter_than_retry_after(attempt: int, retry_after_s: float) -> None:
    """F20."""
    wait = FullJitter(0.2, 10.0)
    assert 0 <= wait(state_after(BootFailed("x"), attempt)) <= min(10.0, 0.2 * 2**attempt)
    waited_s = wait(state_after(RateLimited("429", retry_after_s), attempt))
    assert retry_after_s <= waited_s <= retry_after_s + 10.0


def test_retries_are_defined_only_in_the_retry_table() -> None:
    folder = Path(admission_module.__file__).parents[1]
    users = {
        path.name
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any("tenacity" in name for name in [getattr(node, "module", "") or "", *(a.name for a in node.names)])
    }
    assert users == {"retry.py"}
