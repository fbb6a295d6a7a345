"""The spans of the pool: queue and boots, below the span that waits for the lease. In virtual time."""

from __future__ import annotations

import asyncio

import pytest

from headrace.actors.simulation.virtual.virtual_time import run_virtual
from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.errors import ImageUnknown, QueueTimeout, SandboxError
from headrace.sandboxes.pool import boot_spans
from headrace.sandboxes.pool.boot import LeaseRequest
from headrace.sandboxes.pool.pool import Pool, PoolConfig
from headrace.sandboxes.simulated.provider import SimulatedProvider, SimulationConfig
from headrace.serve.tracing import span_names as names
from headrace.serve.tracing.tracing import traceparent_of
from support.recorded_spans import RecordedSpans, attributes_of, parent_id, recorded_spans


def pool_of(*providers: SimulatedProvider, **settings: object) -> Pool:
    config = PoolConfig.model_validate({"evaluation_reserve": 1, **settings})
    return Pool({each.name: each for each in providers}, config, clock=asyncio.get_running_loop().time)


def simulated(name: str = "host", **settings: object) -> SimulatedProvider:
    return SimulatedProvider(SimulationConfig.model_validate({"boot_s": 3, "boot_sigma": 0, **settings}), name=name)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> object:
    with recorded_spans(monkeypatch, boot_spans) as recorded:
        yield recorded


def test_queue_and_boot_are_children_of_the_span_that_waits(recorded: RecordedSpans) -> None:
    async def main() -> None:
        async with pool_of(simulated(), max_live=2) as pool:
            first = await pool.lease_one(LeaseRequest(spec=SandboxSpec(image="a")))
            with recorded.tracer.start_as_current_span("waiting") as waiting:
                traceparent = traceparent_of(waiting)
            request = LeaseRequest(spec=SandboxSpec(image="b"), traceparent=traceparent)
            second = asyncio.create_task(pool.lease_one(request))
            await asyncio.sleep(5)
            await pool.release([first.ref.id])
            await second

    run_virtual(main())
    waiting, queue = recorded.one("waiting"), recorded.one(names.POOL_QUEUE)
    alone, boot = recorded.named(names.POOL_BOOT)
    assert waiting.context is not None and queue.context is not None and alone.context is not None
    assert parent_id(queue) == parent_id(boot) == waiting.context.span_id
    assert queue.context.trace_id == waiting.context.trace_id != alone.context.trace_id
    assert parent_id(alone) == 0
    expected = {names.SANDBOX_HOST: "host", names.SANDBOX_IMAGE: "b", names.SANDBOX_TRY: 1}
    assert attributes_of(queue) == expected
    assert attributes_of(boot) == {**expected, names.SANDBOX_WARM: False}


def test_each_try_has_a_span_with_its_host_number_and_error(recorded: RecordedSpans) -> None:
    async def main() -> None:
        broken, whole = simulated("a-broken", boot_failure=1.0), simulated("whole")
        async with pool_of(broken, whole) as pool:
            lease = await pool.lease_one(LeaseRequest(spec=SandboxSpec()))
            assert lease.tries == 2

    run_virtual(main())
    tries = [attributes_of(span) for span in recorded.named(names.POOL_BOOT)]
    assert [(each[names.SANDBOX_HOST], each[names.SANDBOX_TRY]) for each in tries] == [("a-broken", 1), ("whole", 2)]
    assert [each.get(names.ERROR_TYPE) for each in tries] == ["BootFailed", None]
    assert [span.status.is_ok for span in recorded.named(names.POOL_BOOT)] == [False, True]
    assert not recorded.named(names.POOL_QUEUE), "nothing waited for a place"


def test_an_unknown_image_and_a_queue_without_end_are_errors(recorded: RecordedSpans) -> None:
    async def main() -> None:
        async with pool_of(simulated(images=("known",)), max_live=2) as pool:
            with pytest.raises(ImageUnknown):
                await pool.lease_one(LeaseRequest(spec=SandboxSpec(image="other")))
            await pool.lease_one(LeaseRequest(spec=SandboxSpec(image="known", ttl_s=1000)))
            with pytest.raises(QueueTimeout):
                await pool.lease_one(LeaseRequest(spec=SandboxSpec(image="known"), queue_timeout_s=4))

    run_virtual(main())
    assert attributes_of(recorded.named(names.POOL_BOOT)[0])[names.ERROR_TYPE] == "ImageUnknown"
    assert attributes_of(recorded.one(names.POOL_QUEUE))[names.ERROR_TYPE] == "QueueTimeout"


def test_the_check_of_a_warm_sandbox_is_a_warm_boot(recorded: RecordedSpans) -> None:
    async def main() -> None:
        async with pool_of(simulated(), warm={"image": 1}) as pool:
            await asyncio.sleep(10)
            with recorded.tracer.start_as_current_span("waiting") as waiting:
                request = LeaseRequest(spec=SandboxSpec(image="image"), traceparent=traceparent_of(waiting))
            assert (await pool.lease_one(request)).warm

    run_virtual(main())
    waiting = recorded.one("waiting")
    assert waiting.context is not None
    [taken] = [span for span in recorded.named(names.POOL_BOOT) if parent_id(span) == waiting.context.span_id]
    assert attributes_of(taken) == {
        names.SANDBOX_HOST: "host",
        names.SANDBOX_IMAGE: "image",
        names.SANDBOX_WARM: True,
    }
    ahead = [span for span in recorded.named(names.POOL_BOOT) if span is not taken]
    assert ahead and all(attributes_of(span)[names.SANDBOX_WARM] and parent_id(span) == 0 for span in ahead)


def test_a_malformed_traceparent_changes_nothing_but_the_parent(recorded: RecordedSpans) -> None:
    async def main() -> None:
        async with pool_of(simulated()) as pool:
            refs = [
                await pool.lease_one(LeaseRequest(spec=SandboxSpec(), traceparent=text))
                for text in ("", "00-zz-\n", "x" * 5000)
            ]
            assert not any(isinstance(ref, SandboxError) for ref in refs)

    run_virtual(main())
    assert [parent_id(span) for span in recorded.named(names.POOL_BOOT)] == [0, 0, 0]
