"""Time of image builds with an empty and with a warm cache, and of many builds at once (local provider)."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

from headrace.sandboxes.images.build_context import store_files
from headrace.sandboxes.images.build_steps import BuildStep, Recipe, StepKind
from headrace.sandboxes.images.builder import ImageBuilder
from headrace.sandboxes.images.layers import UnpackLimits
from headrace.sandboxes.local.provider import LocalProvider, LocalSandboxConfig

_LAYERS = 6
_AT_ONCE = 16


async def measure(folder: Path, repeats: int) -> dict[str, float]:
    """Return medians in milliseconds: a build of `_LAYERS` small layers without and with a cache, and of one file of 64
    MiB; and builds per second of 16 different ones at once."""
    context = folder / "context"
    context.mkdir()
    (context / "file").write_bytes(b"x" * 4096)
    async with LocalProvider(LocalSandboxConfig(image_folder=folder / "images")) as provider:
        files = provider.store.files
        files.prepare()
        builder = ImageBuilder(provider)
        copied = store_files(files, context, "file", UnpackLimits(1 << 20))

        def recipe(name: str) -> Recipe:
            runs = [
                BuildStep(kind=StepKind.RUN, arguments=(f"echo {name} {number} > /tmp/{number}",))
                for number in range(_LAYERS - 1)
            ]
            copy = BuildStep(kind=StepKind.COPY, arguments=("file", "/opt/file"), context=copied)
            return Recipe(base="host", steps=(copy, *runs))

        async def timed(one: Recipe) -> float:
            began = time.perf_counter()
            await builder.build(one)
            return (time.perf_counter() - began) * 1000

        large = BuildStep(kind=StepKind.RUN, arguments=("head -c 64M /dev/urandom > /opt/large",))
        await builder.build(Recipe(base="host"))
        cold = [await timed(recipe(f"cold-{number}")) for number in range(repeats)]
        warm = [await timed(recipe("cold-0")) for _ in range(repeats)]
        sizes = [await timed(Recipe(base="host", steps=(large,), force=True)) for _ in range(repeats)]
        began = time.perf_counter()
        await asyncio.gather(*(timed(recipe(f"many-{number}")) for number in range(_AT_ONCE)))
        together_s = time.perf_counter() - began
    return {
        "layers": _LAYERS,
        "cold_ms": round(statistics.median(cold), 1),
        "warm_ms": round(statistics.median(warm), 1),
        "layer_of_64_mib_ms": round(statistics.median(sizes), 1),
        "builds_per_s_at_16": round(_AT_ONCE / together_s, 1),
    }
