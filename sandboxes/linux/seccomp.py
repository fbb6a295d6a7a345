"""Seccomp filter for sandboxes, which forbids system calls whose effects namespaces do not contain.

Invariants:
- Only the socket families unix, inet, inet6 and netlink are allowed: a vsock reaches the hypervisor from any network
  namespace.
- There is no io_uring (it can open sockets without passing the filter), bpf, perf, userfaultfd, keyrings, modules,
  kexec or file handles, and no syslog: where kernel.dmesg_restrict is 0, everybody reads the host's messages.
- io_setup does not exist: fs.aio-max-nr is one number for the whole host, and a process can take all of it. Programs
  with another way (MariaDB, nginx) use that.
- Sockets get no filters (SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF, SO_LOCK_FILTER): the kernel compiles them into
  memory that no control group counts, and net.core.bpf_jit_limit is one number for the whole host.
- Only the native calling convention is allowed: 32-bit and x32 programs get ENOSYS, because their call numbers would
  pass the checks.
- Filters of a process take the same memory. All of its filters together may have 32,768 instructions, in each process
  anew; those that the launcher has installed before it forked (`fillers`) leave 4,000 of them to a process.
- Forbidden calls fail with an error number; no process is killed.
"""

from __future__ import annotations

import errno
import struct
from typing import Final, NamedTuple

# include/uapi/linux/{filter,seccomp,audit}.h
_LOAD: Final = 0x20
_JUMP_EQUAL: Final = 0x15
_JUMP_GREATER_EQUAL: Final = 0x35
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_ERROR: Final = 0x00050000
_NUMBER_OFFSET: Final = 0
_ARCHITECTURE_OFFSET: Final = 4
_FIRST_ARGUMENT_OFFSET: Final = 16
_SECOND_ARGUMENT_OFFSET: Final = 24
_THIRD_ARGUMENT_OFFSET: Final = 32
_X32_BIT: Final = 0x40000000

_FAMILIES: Final = (1, 2, 10, 16)
_IO_URING: Final = (425, 426, 427)
_FILLERS: Final = (4096, 4096, 4096, 2048)
"""Each of these instructions becomes two of the kernel's own, which are counted."""
_SOL_SOCKET: Final = 1
_SOCKET_FILTERS: Final = (26, 44, 51)


class _Architecture(NamedTuple):
    audit: int
    socket: int
    setsockopt: int
    io_setup: int
    refused: tuple[int, ...]
    """add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, open_by_handle_at, kexec_load, kexec_file_load,
    init_module, finit_module, delete_module, syslog"""


_ARCHITECTURES: Final = {
    "x86_64": _Architecture(0xC000003E, 41, 54, 206, (248, 249, 250, 321, 298, 323, 304, 246, 320, 175, 313, 176, 103)),
    "aarch64": _Architecture(
        0xC00000B7, 198, 208, 0, (217, 218, 219, 280, 241, 282, 265, 104, 294, 105, 273, 106, 116)
    ),
}


def filter_program(machine: str) -> bytes | None:
    """Return classic BPF instructions (`struct sock_filter`) for a machine name from uname, or None if it is
    unknown."""
    architecture = _ARCHITECTURES.get(machine)
    if architecture is None:
        return None
    no_call, not_permitted = _ERROR | errno.ENOSYS, _ERROR | errno.EPERM
    program = [
        _instruction(_LOAD, _ARCHITECTURE_OFFSET),
        _instruction(_JUMP_EQUAL, architecture.audit, if_true=1),
        _instruction(_RETURN, no_call),
        _instruction(_LOAD, _NUMBER_OFFSET),
        _instruction(_JUMP_GREATER_EQUAL, _X32_BIT, if_false=1),
        _instruction(_RETURN, no_call),
    ]
    for number in (*architecture.refused, *_IO_URING):
        program += [_instruction(_JUMP_EQUAL, number, if_false=1), _instruction(_RETURN, not_permitted)]
    program += [_instruction(_JUMP_EQUAL, architecture.io_setup, if_false=1), _instruction(_RETURN, no_call)]
    # The kernel takes both arguments as 32 bits, which the second word of neither can change.
    options = [_instruction(_LOAD, _SECOND_ARGUMENT_OFFSET), _instruction(_JUMP_EQUAL, _SOL_SOCKET, if_true=1)]
    options += [_instruction(_RETURN, _ALLOW), _instruction(_LOAD, _THIRD_ARGUMENT_OFFSET)]
    for option in _SOCKET_FILTERS:
        options += [
            _instruction(_JUMP_EQUAL, option, if_false=1),
            _instruction(_RETURN, _ERROR | errno.ENOPROTOOPT),
        ]
    options.append(_instruction(_RETURN, _ALLOW))
    program += [_instruction(_JUMP_EQUAL, architecture.setsockopt, if_false=len(options)), *options]
    families = [_instruction(_LOAD, _FIRST_ARGUMENT_OFFSET)]
    for family in _FAMILIES:
        families += [_instruction(_JUMP_EQUAL, family, if_false=1), _instruction(_RETURN, _ALLOW)]
    families.append(_instruction(_RETURN, _ERROR | errno.EAFNOSUPPORT))
    program += [_instruction(_JUMP_EQUAL, architecture.socket, if_false=len(families)), *families]
    program.append(_instruction(_RETURN, _ALLOW))
    return b"".join(program)


def fillers() -> list[bytes]:
    """Return filters that allow every call, and that count as long as possible (MAX_INSNS_PER_PATH in
    kernel/seccomp.c)."""
    return [_instruction(_RETURN, _ALLOW) * length for length in _FILLERS]


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
