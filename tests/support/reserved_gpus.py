"""Actors that reserve logical GPUs of a local Ray: `python -m support.reserved_gpus FOLDER`.

Prints, as JSON, which devices each actor may use: before and after the death of one of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from headrace.actors.cluster.nodes.probe import _probe_function
from headrace.actors.engines.devices import visible_devices
from headrace.actors.runtime.actors.operations import until_back
from headrace.actors.runtime.actors.runtime import RayRuntime, Resources, offered_gpus, start_local_ray, stop_local_ray

GPUS = {"learner": 1, "engines": 3, "replay": 0}
"""What a learner on cuda, an engine group with an engine of two devices and an NCCL sender, and others reserve."""


class Owner:
    """An actor that reports which devices it may use."""

    async def devices(self) -> tuple[str, ...]:
        """Return the visible devices; without CUDA_VISIBLE_DEVICES a process would see all of them."""
        return visible_devices() if "CUDA_VISIBLE_DEVICES" in os.environ else ("all",)

    async def process_id(self) -> int:
        return os.getpid()


async def probed() -> list[bool]:
    """Return whether the probe of a cluster's nodes finds GPUs hidden: here, and as on a node that Ray started by
    default."""
    import ray

    probe = ray.remote(num_cpus=0)(_probe_function())
    by_default = probe.options(runtime_env={"env_vars": {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}})
    return [(await task.remote("/dev/null", [], "", ""))["hides_gpus"] for task in (probe, by_default)]


async def main() -> None:
    runtime = RayRuntime()
    owners = {
        name: await runtime.spawn(Owner, name=name, resources=Resources(gpus=gpus)) for name, gpus in GPUS.items()
    }
    before = {name: await owner.devices() for name, owner in owners.items()}
    engines = owners["engines"]
    dead = await engines.process_id()
    await runtime.restart(engines, dead)
    while await until_back(engines.process_id) == dead:
        pass
    after = {name: await until_back(owner.devices) for name, owner in owners.items()}
    found = {"offered": offered_gpus(), "before": before, "after": after, "hides_gpus": await probed()}
    sys.stdout.write(json.dumps(found) + "\n")
    for owner in owners.values():
        await runtime.stop(owner)


if __name__ == "__main__":
    start_local_ray(sys.argv[1], object_store_bytes=80 << 20, gpus=4)
    try:
        asyncio.run(main())
    finally:
        stop_local_ray()
