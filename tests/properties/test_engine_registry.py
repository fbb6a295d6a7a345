"""The registry of engines and the circuit breaker under any order of events."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.actors.engines.registry import LIVING, EngineRegistry, EngineState, Origin, address, new_breaker
from headrace.actors.errors import EngineAddressTaken, EngineUnknown
from headrace.buffer.primitives.circuit_breaker import BreakerState
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId

NAMES = st.sampled_from([EngineId(name) for name in ("a", "b", "c", "d")])
PLACES = st.sampled_from(["place-1", "place-2", "place-3"])
URLS = st.sampled_from(["http://h:1", "http://h:2", "http://H:2/", "http://localhost:3", "http://127.0.0.1:3"])


class Registering(RuleBasedStateMachine):
    """Any event for any engine: those that cannot be are refused and change nothing."""

    @initialize()
    def begin(self) -> None:
        self.registry = EngineRegistry()
        self.now = 0.0
        self.given: dict[EngineId, int] = {}

    @rule(name=NAMES, place=PLACES, origin=st.sampled_from(Origin), url=st.one_of(st.just(""), URLS))
    def start(self, name: EngineId, place: str, origin: Origin, url: str) -> None:
        with suppress(ValueError, EngineAddressTaken):
            self.registry.starting(name, place=place, origin=origin, now=self.now, url=url)
            self.given.pop(name, None)

    @rule(name=NAMES, url=URLS)
    def answer(self, name: EngineId, url: str) -> None:
        with suppress(ValueError, EngineAddressTaken, EngineUnknown):
            self.registry.answered(name, url=url, version=None)
            self.given.pop(name, None)

    @rule(name=NAMES, step=st.integers(0, 9))
    def serve(self, name: EngineId, step: int) -> None:
        with suppress(ValueError, EngineUnknown):
            self.registry.serves(name, PolicyVersion(1, step))
            self.given[name] = step

    @rule(
        name=NAMES,
        change=st.sampled_from(
            ["left_behind", "leaving", "suspect", "quarantine", "gone", "failed", "missed", "heard"]
        ),
    )
    def change(self, name: EngineId, change: str) -> None:
        reason = {"suspect": ("r",), "gone": ("r",), "quarantine": ("r", self.now), "failed": ("r", self.now)}
        with suppress(ValueError, EngineUnknown):
            getattr(self.registry, change)(name, *reason.get(change, ()))

    @rule(seconds=st.floats(0, 400))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def addresses_and_places_are_taken_once(self) -> None:
        living = self.registry.living()
        urls = [address(entry.url) for entry in living if entry.url]
        assert len(urls) == len(set(urls))
        assert len({entry.place for entry in living}) == len(living)

    @invariant()
    def only_those_that_serve_are_routed_to(self) -> None:
        admitted = {route.engine_id for route in self.registry.table(1).engines if route.admitted}
        serving = {entry.engine_id: entry for entry in self.registry.in_state(EngineState.SERVING)}
        assert admitted == set(serving)
        for name, entry in serving.items():
            assert entry.version == PolicyVersion(1, self.given[name])
            assert entry.reason == ""

    @invariant()
    def nobody_is_due_who_may_not_be_tried(self) -> None:
        for entry in self.registry.due(self.now):
            assert entry.state in LIVING
            assert self.registry.may_try(entry.place, self.now)


TestRegistering = Registering.TestCase
TestRegistering.settings = settings(max_examples=60, stateful_step_count=40)


@given(steps=st.lists(st.tuples(st.floats(0, 500), st.sampled_from(["fail", "succeed", "try"])), max_size=60))
def test_an_open_breaker_allows_one_probe_in_each_delay(steps: list[tuple[float, str]]) -> None:
    """F3."""
    breaker, now = new_breaker(), 0.0
    last_probe_s: float | None = None
    for seconds, event in steps:
        now += seconds
        if event == "try":
            if not breaker.allows(now):
                continue
            probing = breaker.state(now) is BreakerState.HALF_OPEN
            breaker.begin(now)
            if probing:
                assert last_probe_s is None or now - last_probe_s >= breaker.open_s
                assert not breaker.allows(now)
                last_probe_s = now
        elif event == "succeed":
            breaker.succeeded()
            assert breaker.state(now) is BreakerState.CLOSED
            last_probe_s = None
        else:
            was_closed = breaker.state(now) is BreakerState.CLOSED
            breaker.failed(now)
            assert was_closed or breaker.state(now) is BreakerState.OPEN
            last_probe_s = None
        assert breaker.open_s <= breaker.delay_s <= breaker.longest_open_s


@given(gaps=st.lists(st.floats(0, 290), min_size=3, max_size=40))
def test_delays_grow_while_failures_fall_within_the_window(gaps: list[float]) -> None:
    breaker, now, delays = new_breaker(), 0.0, []
    for gap in gaps:
        now += gap
        before = breaker.state(now)
        breaker.failed(now)
        if breaker.state(now) is BreakerState.OPEN and before is not BreakerState.OPEN:
            delays.append(breaker.delay_s)
    assert delays == sorted(delays)
