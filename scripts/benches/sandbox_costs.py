"""The costs of a local sandbox: processor time, latencies, boot rate by concurrency, idle memory, clones.

Invariants:
- Everything is measured with the provider's defaults and every guarantee that `headrace doctor` finds; the report names
  them.
- Processor time includes the launcher, its ended children (each sandbox's first process and that process's descendants)
  and this process; idle time is not subtracted because the launcher has none.
- A repeated figure is a median, reported with its minimum and maximum.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from headrace.sandboxes.base import Sandbox, SandboxRef, SandboxSpec
from headrace.sandboxes.doctor import probe
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

_MEBI: Final = 1 << 20
_TOOL: Final = "mkdir -p /opt/tool && head -c {size} /dev/urandom > /opt/tool/data && echo 1 > /opt/tool/version"


async def measure(
    *,
    cycles: int = 40,
    execs: int = 200,
    boots: int = 64,
    idle: int = 40,
    repeats: int = 5,
    concurrencies: Sequence[int] = (1, 8, 32, 64),
) -> dict[str, Any]:
    """Return the figures by key: create_destroy_cpu_ms, create_destroy_wall_ms, exec_p50_ms, exec_p99_ms, write_p50_ms,
    clone_p50_ms (boot from a prepared layer of 32 MiB), idle_memory_mb (memory of an idle sandbox's control group:
    process, files and kernel), boots_per_s_c<n>; `spread`: minimum and maximum of the repeats by key; `guarantees` and
    `missing`: names that `headrace doctor` prints. Raises NamespacesUnavailable."""
    guarantees = await asyncio.to_thread(probe)
    async with LocalProvider(LocalSandboxConfig()) as provider:
        await _cycle(provider)
        rounds: list[dict[str, float]] = []
        for _ in range(repeats):
            figures = {**await _create_destroy(provider, cycles), **await _latencies(provider, execs)}
            for width in concurrencies:
                figures[f"boots_per_s_c{width}"] = await _boot_rate(provider, boots, width)
            rounds.append({**figures, "clone_p50_ms": await _clones(provider, cycles)})
        sandboxes = [await _boot(provider) for _ in range(idle)]
        used = [(await sandbox.usage()).memory_bytes for sandbox in sandboxes]
        for sandbox in sandboxes:
            await sandbox.kill()
    by_key = {name: [figures[name] for figures in rounds] for name in rounds[0]}
    return {
        **{name: statistics.median(values) for name, values in by_key.items()},
        "idle_memory_mb": statistics.median(used) / _MEBI,
        "repeats": repeats,
        "spread": {name: (min(values), max(values)) for name, values in by_key.items()},
        "guarantees": [guarantee.name for guarantee in guarantees if guarantee.present],
        "missing": {guarantee.name: guarantee.detail for guarantee in guarantees if not guarantee.present},
    }


async def _boot(provider: LocalProvider, image: str = "host") -> Sandbox:
    return await provider.attach(await provider.create(SandboxSpec(image=image)))


async def _cycle(provider: LocalProvider) -> None:
    await (await _boot(provider)).kill()


async def _create_destroy(provider: LocalProvider, cycles: int) -> dict[str, float]:
    launcher_cpu_s, own_cpu_s, wall_s = await provider.cpu_s(), time.process_time(), time.perf_counter()
    for _ in range(cycles):
        await _cycle(provider)
    wall_s = time.perf_counter() - wall_s
    cpu_s = (await provider.cpu_s() - launcher_cpu_s) + (time.process_time() - own_cpu_s)
    return {"create_destroy_cpu_ms": 1000 * cpu_s / cycles, "create_destroy_wall_ms": 1000 * wall_s / cycles}


async def _timed_ms(action: Callable[[], Coroutine[None, None, object]]) -> float:
    started = time.perf_counter()
    await action()
    return 1000 * (time.perf_counter() - started)


async def _latencies(provider: LocalProvider, count: int) -> dict[str, float]:
    sandbox = await _boot(provider)
    exec_ms, write_ms = [], []
    for _ in range(count):
        exec_ms.append(await _timed_ms(lambda: sandbox.exec("true", timeout_s=30)))
        write_ms.append(await _timed_ms(lambda: sandbox.write("/workspace/file", b"some bytes")))
    await sandbox.kill()
    return {
        "exec_p50_ms": _quantile(exec_ms, 0.5),
        "exec_p99_ms": _quantile(exec_ms, 0.99),
        "write_p50_ms": _quantile(write_ms, 0.5),
    }


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def _boot_rate(provider: LocalProvider, boots: int, width: int) -> float:
    """Return boots per second with `width` concurrent boots; the sandboxes stay alive until all have booted."""
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
    await _kill(provider, refs)
    return rate


async def _kill(provider: LocalProvider, refs: Sequence[SandboxRef]) -> None:
    for ref in refs:
        await (await provider.attach(ref)).kill()


async def _clones(provider: LocalProvider, count: int) -> float:
    """Return the median milliseconds of a boot from a snapshot."""
    sandbox = await _boot(provider)
    prepared = await sandbox.exec(_TOOL.format(size="32M"), timeout_s=60)
    if prepared.exit_code != 0:
        raise RuntimeError(f"the layer to clone could not be prepared: {prepared.stderr!r}")
    image = await sandbox.snapshot()
    times_ms = []
    for _ in range(count):
        refs: list[SandboxRef] = []

        async def clone(refs: list[SandboxRef] = refs) -> None:
            refs.append(await provider.create(SandboxSpec(image=image)))

        times_ms.append(await _timed_ms(clone))
        await _kill(provider, refs)
    await provider.drop_image(image)
    return _quantile(times_ms, 0.5)
