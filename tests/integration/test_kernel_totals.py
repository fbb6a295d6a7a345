"""Numbers that the kernel counts for more than one process: what one sandbox takes is not missing in another.

docs/attacks.md lists them; each test takes all that one sandbox gets, holds it, and takes the same in another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio

from headrace.sandboxes.base import Sandbox, SandboxSpec
from headrace.sandboxes.local.provider import LocalProvider

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]

BEGIN: Final = """
import ctypes, fcntl, os, select, signal, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
kept, number = [], 0

def file(descriptor):
    return descriptor >= 0

def pipe():
    kept.append(os.pipe())
    return fcntl.fcntl(kept[-1][1], fcntl.F_SETPIPE_SZ, 1 << 20) > 0

def watch():
    path = f"/dev/shm/{number}"
    open(path, "w").close()
    return libc.inotify_add_watch(kept[0], path.encode(), 2) >= 0

def lock():
    fcntl.lockf(kept[0], fcntl.LOCK_EX, 1, 2 * number)
    return True

def epoll():
    kept.append(os.eventfd(0))
    kept[0].register(kept[-1])
    return True

def name():
    libc.access(f"/dev/shm/missing-{number}".encode(), 0)
    return True

def terminal():
    kept.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
    return True

def queue():
    return libc.sigqueue(os.getpid(), 40, ctypes.c_void_p(1)) == 0

def call_filter():
    program = struct.pack("=HBBI", 6, 0, 0, 0x7FFF0000) * 500
    text = ctypes.create_string_buffer(program)
    argument = ctypes.create_string_buffer(struct.pack("@HP", 500, ctypes.addressof(text)))
    libc.prctl(38, 1, 0, 0, 0)
    return libc.prctl(22, 2, argument, 0, 0) == 0
"""
END: Final = """
why = "as many as were wanted"
try:
    while number < most and take():
        number += 1
    if number < most:
        why = os.strerror(ctypes.get_errno())
except OSError as error:
    why = os.strerror(error.errno)
print(number, why, flush=True)
if sys.argv[1:]:
    signal.pause()
"""
# What is taken, the most that is tried, the least that a sandbox must get.
TAKEN: Final = {
    "inotify instances": ("take = lambda: file(libc.inotify_init())", 200, 100),
    "inotify watches": ("kept.append(libc.inotify_init()); take = watch", 20_000, 8_000),
    "fanotify groups": ("take = lambda: file(libc.fanotify_init(0x200, 0))", 200, 100),
    "POSIX timers": ("take = lambda: libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())) == 0", 200_000, 2_000),
    "queued signals": ("signal.pthread_sigmask(signal.SIG_BLOCK, {40}); take = queue", 200_000, 2_000),
    "POSIX message queues": ("take = lambda: file(libc.mq_open(b'/%d' % number, 0o102, 0o600, None))", 300, 5),
    "System V queues": ("take = lambda: file(libc.msgget(0, 0o1600))", 40_000, 100),
    "System V semaphores": ("take = lambda: file(libc.semget(0, 100, 0o1600))", 40_000, 20),
    "pipes of 1 MiB": ("take = pipe", 1000, 10),
    "file locks": ("kept.append(os.open('/dev/shm/locked', os.O_RDWR | os.O_CREAT)); take = lock", 3000, 3000),
    "epoll watches": ("kept.append(select.epoll()); take = epoll", 4000, 4000),
    "terminals": ("take = terminal", 100, 32),
    "names of files": ("take = name", 200_000, 200_000),
    "call filters": ("take = call_filter", 100, 3),
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pair() -> AsyncIterator[tuple[Sandbox, Sandbox]]:
    async with LocalProvider() as provider:
        first, second = [await provider.attach(await provider.create(SandboxSpec())) for _ in range(2)]
        yield first, second


@pytest.mark.parametrize("taken", TAKEN)
async def test_what_one_sandbox_takes_is_not_missing_in_another(pair: tuple[Sandbox, Sandbox], taken: str) -> None:
    take, most, least = TAKEN[taken]
    script = f"{BEGIN}\n{take}\nmost = {most}\n{END}"
    greedy = await pair[0].spawn(["python3", "-c", script, "hold"])
    try:
        async with asyncio.timeout(100):
            first = (await anext(aiter(greedy.output()))).data.decode()
        second = (await pair[1].exec(["python3", "-c", script], timeout_s=100)).stdout.decode()
        assert int(first.split()[0]) >= least, first
        assert int(second.split()[0]) >= 0.99 * int(first.split()[0]), (first, second)
    finally:
        await greedy.signal(9)


REFUSED: Final = """
import ctypes, errno, os, socket
libc = ctypes.CDLL(None, use_errno=True)

def told(result):
    return "works" if result >= 0 else errno.errorcode[ctypes.get_errno()]

machine = os.uname().machine
io_setup, add_key = {"x86_64": (206, 248), "aarch64": (0, 217)}[machine]
print("aio", told(libc.syscall(io_setup, 1, ctypes.byref(ctypes.c_ulong(0)))))
print("key", told(libc.syscall(add_key, b"user", b"a", b"b", 1, -3)))
for flag in (0x10000000, 0x40000000, 0x00020000, 0x08000000):
    print("namespace", told(libc.unshare(flag)))
one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
for option in (26, 44, 51, 26 + (1 << 32)):
    # What is above 32 bits of the level and of the option is nothing to the kernel.
    for level in (1, 1 + (1 << 32)):
        call = ctypes.c_long(54 if machine == "x86_64" else 208)
        arguments = (one.fileno(), ctypes.c_long(level), ctypes.c_long(option))
        print("filter", told(libc.syscall(call, *arguments, ctypes.create_string_buffer(16), 16)))
one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
"""


async def test_what_only_the_whole_host_counts_is_refused(pair: tuple[Sandbox, Sandbox]) -> None:
    for user in ("root", "agent"):
        result = await pair[0].exec("python3 -", stdin=REFUSED.encode(), user=user, timeout_s=30)
        namespaces = [line for line in result.stdout.decode().splitlines() if line.startswith("namespace")]
        others = [line for line in result.stdout.decode().splitlines() if not line.startswith("namespace")]
        assert others == ["aio ENOSYS", "key EPERM", *["filter ENOPROTOOPT"] * 8], result
        assert set(namespaces) <= {"namespace EPERM", "namespace ENOSPC"}, result
        assert len(namespaces) == 4
