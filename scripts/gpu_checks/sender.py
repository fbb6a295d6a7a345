"""Checks of the sender of weight pushes, through its client as in a run. No engine takes part: NCCL refuses two
processes on one device."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from gpu_checks.outcome import Bounds, Figure, Outcome
from gpu_checks.place import Place
from headrace.policies.errors import GroupFailed, SenderTimeout
from headrace.policies.push.sender import SenderConfig, SenderProcess

LOAD_S: Final = 60.0
GROUP_S: Final = 20.0
"""Timeout of a group, which bounds its formation and each transfer, as in a push."""
LONELY_S: Final = 10.0
"""Timeout of a group whose other member never comes."""
GRACE_S: Final = 2.0
"""By how much the client waits longer than the group, as in a push (`SENDER_GRACE_S`)."""
KILL_S: Final = 3.0
"""Deadline of a call that is to be missed, well before the group's own timeout."""
KEPT_BYTES: Final = 64 << 20
"""Memory of the device that may be missing after a sender was killed: drivers keep some of their own."""


def check_sender(place: Place) -> Outcome:
    """Send the big model's weights in a group of one, and leave the group."""
    return asyncio.run(_send_alone(place))


def check_missing_peer(place: Place) -> Outcome:
    """Form a group of two whose other member never comes. The group's own timeout should end the call: where only the
    client's does, the sender is killed, and the push starts over with another one."""
    return asyncio.run(_wait_for_a_peer(place))


def check_next_sender(place: Place) -> Outcome:
    """Kill a sender in the middle of a call that hangs, and send with the next one."""
    return asyncio.run(_kill_and_send(place))


async def _send_alone(place: Place) -> Outcome:
    async with _sender(place) as sender:
        measured = await _send(place, sender, await _load(place, sender))
        measured["incarnation"] = sender.incarnation
    return Outcome(measured=measured, bounds={"incarnation": (1, 1)}, not_run=place.without_nccl)


async def _wait_for_a_peer(place: Place) -> Outcome:
    async with _sender(place) as sender:
        await _load(place, sender)
        # The first transfer of a process loads NCCL, which is not what is timed here.
        await _send(place, sender, 1)
        started_s = time.perf_counter()
        ended_in, error = await _hang(place, sender, group_s=LONELY_S, call_s=LONELY_S + GRACE_S * place.patience)
        measured: dict[str, Figure] = {
            "seconds": time.perf_counter() - started_s,
            "ended_in": ended_in,
            "error": str(error),
            "failed_calls": int(error is not None),
            "killed_senders": int(isinstance(error, SenderTimeout)),
        }
    bounds: dict[str, Bounds] = {"failed_calls": (1, 1), "killed_senders": (None, 0)}
    return Outcome(measured=measured, bounds=bounds, not_run=place.without_nccl)


async def _kill_and_send(place: Place) -> Outcome:
    free_bytes = _free_memory(place)
    before = free_bytes()
    async with _sender(place) as sender:
        await _load(place, sender)
        ended_in, error = await _hang(place, sender, group_s=20 * KILL_S, call_s=KILL_S)
        measured: dict[str, Figure] = {
            "killed_in": ended_in,
            "killed_senders": int(isinstance(error, SenderTimeout)),
            "bytes_kept": max(0, before - free_bytes()),
        }
        measured |= await _send(place, sender, await _load(place, sender))
        measured["incarnation"] = sender.incarnation
    bounds: dict[str, Bounds] = {"killed_senders": (1, 1), "bytes_kept": (None, KEPT_BYTES), "incarnation": (2, 2)}
    return Outcome(measured=measured, bounds=bounds, not_run=place.without_nccl)


def _sender(place: Place) -> SenderProcess:
    start_s = SenderConfig().start_timeout_s * place.patience
    return SenderProcess(SenderConfig(log_path=place.folder / "sender.log", start_timeout_s=start_s))


async def _load(place: Place, sender: SenderProcess) -> int:
    """Load the big model's weights, and return the number of buckets."""
    path = place.model(big=True)[0] / "model.safetensors"
    size = (64 << 10) if place.small else (256 << 20)
    asked = {"files": {str(path): None}, "bucket_bytes": size, "checksums": False}
    reply = await sender.call("load", asked, timeout_s=LOAD_S * place.patience)
    return len(reply["buckets"])


async def _open_group(place: Place, sender: SenderProcess, *, world_size: int, timeout_s: float) -> None:
    asked = {"name": "checked", "host": "127.0.0.1", "world_size": world_size, "backend": place.backend}
    await sender.call("open_group", asked | {"timeout_s": timeout_s}, timeout_s=GROUP_S * place.patience)


async def _send(place: Place, sender: SenderProcess, buckets: int) -> dict[str, Figure]:
    """Send all buckets in a group of one. Raises what the sender raises."""
    started_s = time.perf_counter()
    await _open_group(place, sender, world_size=1, timeout_s=GROUP_S)
    await sender.call("join_group", {"name": "checked"}, timeout_s=GROUP_S + GRACE_S * place.patience)
    formed_s = time.perf_counter()
    for bucket in range(buckets):
        await sender.call(
            "broadcast", {"name": "checked", "bucket": bucket}, timeout_s=GROUP_S + GRACE_S * place.patience
        )
    sent_s = time.perf_counter()
    await sender.call("close_group", {"name": "checked"}, timeout_s=GROUP_S + GRACE_S * place.patience)
    return {"backend": place.backend, "buckets": buckets, "form_s": formed_s - started_s, "send_s": sent_s - formed_s}


async def _hang(
    place: Place, sender: SenderProcess, *, group_s: float, call_s: float
) -> tuple[str, GroupFailed | SenderTimeout | None]:
    """Join a group of two and send, without the other member. Return the call that failed, and its error."""
    await _open_group(place, sender, world_size=2, timeout_s=group_s)
    # gloo waits for all members when the group is formed, NCCL at the first transfer.
    for call, asked in (("join_group", {}), ("broadcast", {"bucket": 0})):
        try:
            await sender.call(call, {"name": "checked", **asked}, timeout_s=call_s)
        except (GroupFailed, SenderTimeout) as error:
            return call, error
    return "", None


def _free_memory(place: Place) -> Callable[[], int]:
    """Return what reads the free memory of the device, in bytes. On a CPU there is nothing to read."""
    if place.device == "cpu":
        return lambda: 0
    import torch

    # The first call makes this process's own context, which takes memory too.
    torch.cuda.mem_get_info()
    return lambda: torch.cuda.mem_get_info()[0]
