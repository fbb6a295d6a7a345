"""What a sandbox costs here: processor time of create and destroy, latency of a command, boots a second.

Invariants: processor time counts the launcher, its ended children (each sandbox's first process and all it waited for)
and this process; idle time is not subtracted because the launcher has none.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from headrace.sandboxes.base import SandboxSpec
from headrace.sandboxes.local import LocalProvider, LocalSandboxConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.sandboxes.base import SandboxRef


async def measure(
    *, cycles: int = 100, execs: int = 300, boots: int = 64, concurrencies: Sequence[int] = (1, 8, 32)
) -> dict[str, float]:
    """Keys: create_destroy_cpu_ms, create_destroy_wall_ms, exec_p50_ms, exec_p99_ms, write_p50_ms, boots_per_s_c<n>.

    Raises NamespacesUnavailable.
    """
    async with LocalProvider(LocalSandboxConfig()) as provider:
        await _cycle(provider)
        return {
            **await _create_destroy(provider, cycles),
            **await _latencies(provider, execs),
            **{f"boots_per_s_c{width}": await _boot_rate(provider, boots, width) for width in concurrencies},
        }


async def _cycle(provider: LocalProvider) -> None:
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    await sandbox.kill()


async def _create_destroy(provider: LocalProvider, cycles: int) -> dict[str, float]:
    launcher_cpu_s, own_cpu_s, wall_s = await provider.cpu_s(), time.process_time(), time.perf_counter()
    for _ in range(cycles):
        await _cycle(provider)
    wall_s = time.perf_counter() - wall_s
    cpu_s = (await provider.cpu_s() - launcher_cpu_s) + (time.process_time() - own_cpu_s)
    return {"create_destroy_cpu_ms": 1000 * cpu_s / cycles, "create_destroy_wall_ms": 1000 * wall_s / cycles}


async def _latencies(provider: LocalProvider, count: int) -> dict[str, float]:
    sandbox = await provider.attach(await provider.create(SandboxSpec()))
    exec_ms, write_ms = [], []
    for _ in range(count):
        started = time.perf_counter()
        await sandbox.exec("true", timeout_s=30)
        exec_ms.append(1000 * (time.perf_counter() - started))
        started = time.perf_counter()
        await sandbox.write("/workspace/file", b"some bytes")
        write_ms.append(1000 * (time.perf_counter() - started))
    await sandbox.kill()
    return {
        "exec_p50_ms": _quantile(exec_ms, 0.5),
        "exec_p99_ms": _quantile(exec_ms, 0.99),
        "write_p50_ms": _quantile(write_ms, 0.5),
    }


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def _boot_rate(provider: LocalProvider, boots: int, width: int) -> float:
    """Boots a second with `width` at once; the sandboxes live until all have booted."""
    gate = asyncio.Semaphore(width)

    refs: list[SandboxRef] = []

    async def boot() -> None:
        async with gate:
            refs.append(await provider.create(SandboxSpec()))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(boots):
            group.create_task(boot())
    rate = boots / (time.perf_counter() - started)
    for ref in refs:
        await (await provider.attach(ref)).kill()
    return rate
