"""GPUs of a run: how many its processes reserve with Ray, and which engine uses which.

Invariants:
- Every process of a run that uses a GPU has reserved it with Ray, which hides all GPUs from the others.
- Each engine, and the sender of an NCCL push, has devices of its own. A slot keeps its devices when its engine is
  replaced.
- The group's actor reserves the devices of the sender and of the engines that it starts itself; an engine that Ray
  places reserves its own.
- Ray knows neither the GPUs of attached servers nor those of another run on this host: they are kept apart only by
  CUDA_VISIBLE_DEVICES of the process that starts the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from headrace.actors.engines.config import EnginesConfig, Placement
from headrace.actors.engines.registry import address
from headrace.actors.errors import ConfigError
from headrace.policies.errors import EngineSettingsInvalid
from headrace.policies.processes.engine_keys import is_loopback
from headrace.policies.push.contract import PushSection

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """CUDA devices, as CUDA_VISIBLE_DEVICES names them, by the slot of a local engine (`place-1`, ...), and those of
    the sender."""

    engines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    sender: tuple[str, ...] = ()


def sender_gpus(push: PushSection) -> int:
    """Return the number of GPUs of the sender: NCCL needs a device per process, and a push by disk no sender."""
    return int(push.transport == "group" and push.backend == "nccl")


def local_gpus(engines: EnginesConfig, push: PushSection) -> int:
    """Return the number of GPUs that the engine group's actor reserves."""
    if engines.is_simulated:
        return 0
    local = engines.placement is Placement.LOCAL
    return (engines.gpus if local else 0) + sender_gpus(push)


def plan_devices(engines: EnginesConfig, push: PushSection, visible: Sequence[str]) -> DevicePlan:
    """Distribute the visible devices: `tensor_parallel` for each local engine, then one for the sender. Raises
    EngineSettingsInvalid if there are too few."""
    needed = local_gpus(engines, push)
    if len(set(visible)) < needed:
        raise EngineSettingsInvalid(
            f"the local engines and the sender need {needed} GPUs, but {VISIBLE} has {','.join(visible) or 'none'}: "
            "lower engines.count or engines.tensor_parallel"
        )
    size = engines.tensor_parallel
    local = range(needed - sender_gpus(push)) if needed else range(0)
    return DevicePlan(
        engines={f"place-{first // size + 1}": tuple(visible[first : first + size]) for first in local[::size]},
        sender=tuple(visible[len(local) : needed]),
    )


def visible_devices() -> tuple[str, ...]:
    """Return the devices that CUDA_VISIBLE_DEVICES names, which Ray sets for an actor. As for CUDA, they end before the
    first name that is none, such as -1."""
    names = os.environ.get(VISIBLE, "").split(",")
    return tuple(takewhile(lambda name: name not in ("", "-1"), names))


def needed_gpus(engines: EnginesConfig, push: PushSection, *, learner: Mapping[str, int]) -> dict[str, int]:
    """Return the number of GPUs that each part of a run reserves, by its description; parts without one are left out.
    `learner` has those of the learner, and is empty in an evaluation."""
    parts = {
        **learner,
        f"engines.count {engines.count} x engines.tensor_parallel {engines.tensor_parallel}": engines.gpus,
        "the sender of push.backend nccl": 0 if engines.is_simulated else sender_gpus(push),
    }
    return {part: gpus for part, gpus in parts.items() if gpus}


def refuse_missing_gpus(parts: Mapping[str, int], offered: int) -> None:
    """Raise ConfigError if Ray offers fewer GPUs than `parts` (see `needed_gpus`) reserve: they would wait forever."""
    needed = sum(parts.values())
    if needed > offered:
        named = " + ".join(f"{gpus} for {part}" for part, gpus in parts.items())
        raise ConfigError(
            f"the run needs {needed} GPUs of its own ({named}), but Ray offers {offered} here: lower these numbers, or "
            f"let {VISIBLE} name more devices (with learner.device = cpu, the megatron learner needs none)"
        )


def refuse_shared_gpus(engines: EnginesConfig, parts: Mapping[str, int]) -> None:
    """Raise ConfigError if `parts` reserve GPUs of a host on which an attached server may already use one."""
    local = [url for url in (*engines.attach, *filter(None, [engines.router])) if is_loopback(address(url)[0])]
    if local and engines.device == "cuda" and parts and VISIBLE not in os.environ:
        raise ConfigError(
            f"{local[0]} runs on this host, and the run might reserve a GPU that this server uses "
            f"({', '.join(parts)}): set {VISIBLE} to the devices that the attached servers do not use, and start again"
        )
