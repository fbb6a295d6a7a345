"""Router of the gateway: gate leases, affinity against load, and avoidance of a failed engine."""

from __future__ import annotations

import pytest

from headrace.buffer.trajectories.types import VersionSpan
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId
from headrace.serve.gateway.capture.session import SessionId
from headrace.serve.gateway.http.routing import EngineRoute, Router, RoutingKey, RoutingTable

A, B = EngineId("a"), EngineId("b")
ONE, TWO = RoutingKey(SessionId("one")), RoutingKey(SessionId("two"))


def table(version: int, *engines: EngineId, refused: tuple[EngineId, ...] = ()) -> RoutingTable:
    routes = tuple(EngineRoute(engine_id=e, url=f"http://{e}", admitted=e not in refused) for e in engines)
    return RoutingTable(version=version, engines=routes)


@pytest.fixture
def router() -> Router:
    router = Router(max_imbalance=2)
    assert router.replace(table(1, A, B))
    return router


def test_no_engine_is_chosen_when_there_are_none() -> None:
    assert Router().choose(ONE, 0.0) is None


def test_an_older_table_is_refused(router: Router) -> None:
    assert not router.replace(table(1, A))
    assert not router.replace(table(0, A))
    assert len(router.table.engines) == 2


def test_the_least_busy_engine_is_chosen(router: Router) -> None:
    router.begin(A)
    assert router.choose(ONE, 0.0) == B
    router.begin(B)
    router.begin(B)
    assert router.choose(TWO, 0.0) == A


def test_a_session_stays_on_its_engine_unless_that_engine_is_much_busier(router: Router) -> None:
    assert router.choose(ONE, 0.0) == A
    for _ in range(2):
        router.begin(A)
    assert router.choose(ONE, 0.0) == A
    router.begin(A)
    assert router.choose(ONE, 0.0) == B
    for _ in range(3):
        router.end(A)
    assert router.choose(ONE, 0.0) == B


def test_a_closed_gate_sends_turns_elsewhere_and_opens_on_expiry(router: Router) -> None:
    assert router.choose(ONE, 0.0) == A
    router.close_gate(A, until=10.0, now=0.0)
    assert router.choose(ONE, 5.0) == B
    router.close_gate(B, until=8.0, now=0.0)
    assert router.choose(ONE, 5.0) is None
    assert router.next_opening(5.0) == 8.0
    assert router.choose(ONE, 8.0) == B
    router.open_gate(A, now=5.0)
    assert router.choose(TWO, 5.0) == A


def test_a_failed_engine_is_avoided_only_while_another_is_admitted(router: Router) -> None:
    assert router.choose(ONE, 0.0, avoid=A) == B
    router.close_gate(B, until=10.0, now=0.0)
    assert router.choose(ONE, 0.0, avoid=A) is None, "waiting for B is better than the engine that just failed"
    router.replace(table(2, A, B, refused=(B,)))
    assert router.choose(ONE, 0.0, avoid=A) == A


def test_a_quarantined_engine_gets_no_turn(router: Router) -> None:
    """F5."""
    router.choose(ONE, 0.0)
    router.replace(table(2, A, B, refused=(A,)))
    assert router.choose(ONE, 0.0) == B


def test_in_flight_counts_return_to_zero(router: Router) -> None:
    router.begin(A)
    router.begin(A)
    router.end(A)
    assert router.in_flight == {A: 1}
    router.end(A)
    router.end(A)
    assert router.in_flight == {}


def test_each_lineage_of_a_session_stays_with_its_engine(router: Router) -> None:
    main, child = RoutingKey(ONE.session, b"main"), RoutingKey(ONE.session, b"child")
    assert router.choose(main, 0.0) == A
    router.begin(A)
    assert router.choose(child, 0.0) == B
    assert router.choose(main, 0.0) == A
    router.forget(ONE.session)
    assert router.choose(main, 0.0) == B, "nothing is remembered of a closed session"


def test_equally_busy_engines_are_chosen_by_newest_weights(router: Router) -> None:
    router.note(A, [VersionSpan(start=0, end=1, version=PolicyVersion(1, 4))])
    router.note(
        B,
        [
            VersionSpan(start=0, end=1, version=PolicyVersion(1, 4)),
            VersionSpan(start=1, end=2, version=PolicyVersion(1, 5)),
        ],
    )
    assert router.choose(ONE, 0.0) == B
    router.begin(B)
    assert router.choose(TWO, 0.0) == A, "load comes first"
