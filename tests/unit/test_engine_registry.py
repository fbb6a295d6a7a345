"""Engines by state, their breakers, and what is read of a push that broke off."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.actors.engines.journal import TAIL_BYTES, PushJournal
from headrace.actors.engines.members_file import EngineStatus, Roster, read_roster
from headrace.actors.engines.registry import REMEMBERED, EngineRegistry, EngineState, Origin, new_breaker
from headrace.actors.engines.requests import RequestBox, ask_group
from headrace.actors.errors import EngineAddressTaken, EngineGroupError, EngineUnknown
from headrace.buffer.primitives.circuit_breaker import BreakerState
from headrace.buffer.trajectories.versions import PolicyVersion
from headrace.policies.engine import EngineId, EngineInfo
from headrace.policies.learner import WeightsDirectory, WeightsShard, WeightsSnapshot
from headrace.policies.push.machine import Phase, PushStep
from headrace.policies.push.transfer import group_name

ONE, TWO, THREE = EngineId("one"), EngineId("two"), EngineId("three")
V1, V2 = PolicyVersion(1, 1), PolicyVersion(1, 2)


def registry_of(**engines: str) -> EngineRegistry:
    """Attached engines that wait for weights, by address."""
    registry = EngineRegistry()
    for name, url in engines.items():
        registry.starting(EngineId(name), place=name, origin=Origin.ATTACHED, now=0.0, url=url)
        registry.answered(EngineId(name), url=url, version=None)
    return registry


def test_an_engine_receives_turns_once_it_has_weights() -> None:
    registry = registry_of(one="http://h:1")
    assert [route.admitted for route in registry.table(1).engines] == [False]
    registry.serves(ONE, V1)
    assert [route.admitted for route in registry.table(2).engines] == [True]
    registry.quarantine(ONE, "checksums disagree", 1.0)
    assert [route.admitted for route in registry.table(3).engines] == [False]
    assert registry[ONE].reason == "checksums disagree"


def test_two_engines_at_one_address_are_refused_with_their_names() -> None:
    registry = registry_of(one="http://127.0.0.1:80")
    with pytest.raises(EngineAddressTaken, match="two and one have the same address"):
        registry.starting(TWO, place="two", origin=Origin.ATTACHED, now=0.0, url="http://localhost")
    registry.gone(ONE, "removed")
    registry.starting(TWO, place="two", origin=Origin.ATTACHED, now=0.0, url="http://localhost")


def test_engines_that_are_gone_or_leaving_do_not_return() -> None:
    registry = registry_of(one="http://h:1", two="http://h:2")
    registry.leaving(ONE)
    registry.gone(TWO, "dead")
    for engine_id in (ONE, TWO):
        with pytest.raises(ValueError, match="cannot become serving"):
            registry.serves(engine_id, V1)
    with pytest.raises(EngineUnknown, match="headrace status RUN --engines"):
        registry.leaving(THREE)


def test_only_the_most_recently_removed_engines_are_remembered() -> None:
    registry = EngineRegistry()
    for number in range(REMEMBERED + 5):
        registry.starting(EngineId(str(number)), place="place", origin=Origin.LOCAL, now=0.0)
        registry.gone(EngineId(str(number)), "dead")
    assert REMEMBERED <= len(registry.all()) <= REMEMBERED + 1


def test_a_quarantined_attached_engine_is_probed_as_often_as_its_breaker_allows() -> None:
    registry = registry_of(one="http://h:1")
    for now in (0.0, 1.0):
        registry.quarantine(ONE, "hangs", now)
        assert registry.due(now) == (), "it does not answer yet"
        registry.heard(ONE)
        assert [entry.engine_id for entry in registry.due(now)] == [ONE]
    registry.quarantine(ONE, "hangs", 2.0)
    registry.heard(ONE)
    assert registry.due(2.0) == ()
    assert registry.breaker(registry[ONE].place).state(2.0) is BreakerState.OPEN
    assert [entry.engine_id for entry in registry.due(12.0)] == [ONE]
    registry.trying(ONE, 12.0)
    assert registry.due(12.0) == ()
    registry.serves(ONE, V1)
    assert registry.breaker(registry[ONE].place).state(12.0) is BreakerState.CLOSED


def test_a_quarantined_local_engine_is_replaced_and_not_pushed_to() -> None:
    registry = EngineRegistry()
    registry.starting(ONE, place="place-1", origin=Origin.LOCAL, now=0.0)
    registry.answered(ONE, url="http://h:1", version=None)
    registry.quarantine(ONE, "hangs", 0.0)
    assert registry.due(0.0) == ()


def test_repeated_failures_in_a_slot_increase_its_delay() -> None:
    registry, now, waits = EngineRegistry(), 0.0, []
    for number in range(12):
        began = now
        while not registry.may_try("place-1", now):
            now += 1.0
        waits.append(now - began)
        engine_id = EngineId(f"engine-{number}")
        registry.starting(engine_id, place="place-1", origin=Origin.LOCAL, now=now)
        registry.failed(engine_id, "it died", now)
    assert waits[:3] == [0.0, 0.0, 0.0]
    assert waits[3:8] == [10.0, 20.0, 40.0, 80.0, 160.0]
    assert waits[-1] == 300.0
    assert registry[EngineId("engine-11")].state is EngineState.GONE


def test_a_window_without_failures_resets_the_delay() -> None:
    breaker = new_breaker()
    for now in (0.0, 0.0, 0.0, 10.0, 30.0):
        breaker.failed(now)
    assert breaker.delay_s == 40.0
    breaker.succeeded()
    for now in (400.0, 400.0, 400.0):
        breaker.failed(now)
    assert breaker.delay_s == 10.0


def snapshot(folder: Path, version: PolicyVersion) -> WeightsSnapshot:
    path = folder / "weights"
    path.touch()
    return WeightsSnapshot(version=version, shards=(WeightsShard(path=path, sha256="0"),) * 2)


def step(wave: int, phase: Phase, *engines: EngineId, attempt: int = 0) -> PushStep:
    return PushStep(wave=wave, phase=phase, engines=engines, attempt=attempt)


def info(version: PolicyVersion, *, paused: bool) -> EngineInfo:
    return EngineInfo(server_version="", version=version, running=0, waiting=0, max_context_tokens=9, paused=paused)


async def test_an_interrupted_push_shows_which_engines_may_have_mixed_weights(tmp_path: Path) -> None:
    journal = PushJournal(tmp_path)
    assert journal.broken() is None
    journal.begin(snapshot(tmp_path, V2))
    for phase in Phase:
        await journal.step("push", step(0, phase, ONE))
    attempt = 0
    for phase in (Phase.PROBE, Phase.FORM, Phase.GATE, Phase.PAUSE, Phase.FORM, Phase.BEGIN, Phase.BROADCAST):
        attempt += phase is Phase.PAUSE
        await journal.step("push", step(1, phase, TWO, attempt=attempt))
    broken = PushJournal(tmp_path).broken()
    assert broken is not None
    assert broken.is_whole(ONE, info(V2, paused=False)), "the push itself resumed it"
    assert not broken.is_whole(ONE, info(V2, paused=True)), "the push quarantined it"
    assert not broken.is_whole(TWO, info(V2, paused=True))
    assert not broken.is_whole(TWO, info(V1, paused=True))
    assert broken.is_whole(THREE, info(V1, paused=False)), "its turn had not come"
    assert broken.groups == {
        ONE: (group_name("push", 0, 0),),
        TWO: (group_name("push", 1, 0), group_name("push", 1, 1)),
    }


async def test_a_push_to_many_engines_is_read_from_its_first_journal_line(tmp_path: Path) -> None:
    journal = PushJournal(tmp_path)
    journal.begin(snapshot(tmp_path, V2))
    await journal.step("before", step(0, Phase.BROADCAST, THREE))
    names = [EngineId(f"engine-{number}") for number in range(200)]
    for wave, name in enumerate(names):
        for phase in Phase:
            await journal.step("push", step(wave, phase, name))
    assert (tmp_path / "pushes.jsonl").stat().st_size > TAIL_BYTES
    broken = journal.broken()
    assert broken is not None
    assert set(broken.reached) == set(names)
    assert not broken.is_whole(names[0], info(V2, paused=True)), "the push quarantined it"


async def test_a_journal_of_a_push_by_disk_names_no_groups_and_the_engines_that_were_reading(tmp_path: Path) -> None:
    journal = PushJournal(tmp_path)
    journal.begin(snapshot(tmp_path, V2))
    for phase in (Phase.PROBE, Phase.GATE, Phase.PAUSE, Phase.BROADCAST):
        await journal.step("push", step(0, phase, ONE))
    for phase in (Phase.PROBE, Phase.GATE):
        await journal.step("push", step(1, phase, TWO))
    broken = PushJournal(tmp_path).broken()
    assert broken is not None
    assert broken.groups == {}
    assert broken.in_phase(Phase.BROADCAST) == [ONE]
    assert not broken.is_whole(ONE, info(V1, paused=True))
    assert broken.is_whole(TWO, info(V1, paused=False))


def test_the_newest_directory_is_found_again_while_its_files_exist(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_bytes(b"{}")
    newest = WeightsSnapshot(version=V2, directory=WeightsDirectory.of(model))
    PushJournal(tmp_path).write_newest(newest)
    assert PushJournal(tmp_path).newest() == newest
    (model / "model.safetensors").unlink()
    assert PushJournal(tmp_path).newest() is None


async def test_a_torn_journal_line_is_skipped(tmp_path: Path) -> None:
    journal = PushJournal(tmp_path)
    journal.begin(snapshot(tmp_path, V2))
    await journal.step("push", step(0, Phase.PROBE, ONE))
    with (tmp_path / "pushes.jsonl").open("ab") as file:
        file.write(b'{"push_id": "push", "wa')
    broken = journal.broken()
    assert broken is not None
    assert broken.reached == {ONE: Phase.PROBE}


def test_the_roster_round_trips(tmp_path: Path) -> None:
    status = EngineStatus(
        engine_id=ONE,
        origin=Origin.ATTACHED,
        place="one",
        state=EngineState.SERVING,
        url="http://h:1",
        version="1.2",
        running=3,
        waiting=1,
    )
    Roster(engines=(status,), started=4, retired=frozenset({"place-2"})).write(tmp_path / "members.json")
    roster = read_roster(tmp_path / "members.json")
    assert (roster.engines, roster.started, roster.retired) == ((status,), 4, frozenset({"place-2"}))
    assert roster.engines[0].load == "3+1"
    assert read_roster(tmp_path / "none.json") == Roster()


def test_an_unanswered_request_is_withdrawn(tmp_path: Path) -> None:
    with pytest.raises(EngineGroupError, match="did not answer"):
        ask_group(tmp_path / "requests", "add", "http://h:1", timeout_s=0.1)
    assert RequestBox(tmp_path / "requests").open() == []


def test_files_that_are_not_requests_are_ignored(tmp_path: Path) -> None:
    for name, text in (("a", "[]"), ("b", "{"), ("c", '{"request_id": "x", "kind": "add", "what": "y"}')):
        (tmp_path / f"{name}.json").write_text(text)
    assert RequestBox(tmp_path).open() == []
