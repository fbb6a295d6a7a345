"""Seccomp filter for sandboxes, which forbids system calls whose effects namespaces do not contain.

Invariants:
- Only the socket families unix, inet, inet6 and netlink are allowed: a vsock reaches the hypervisor from any network
  namespace.
- There is no io_uring (it can open sockets without passing the filter), bpf, perf, userfaultfd, keyrings, modules,
  kexec or file handles, and no syslog: where kernel.dmesg_restrict is 0, everybody reads the host's messages.
- Only the native calling convention is allowed: 32-bit and x32 programs get ENOSYS, because their call numbers would
  pass the checks.
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
_X32_BIT: Final = 0x40000000

_FAMILIES: Final = (1, 2, 10, 16)
_IO_URING: Final = (425, 426, 427)


class _Architecture(NamedTuple):
    audit: int
    socket: int
    refused: tuple[int, ...]
    """add_key, request_key, keyctl, bpf, perf_event_open, userfaultfd, open_by_handle_at, kexec_load, kexec_file_load,
    init_module, finit_module, delete_module, syslog"""


_ARCHITECTURES: Final = {
    "x86_64": _Architecture(0xC000003E, 41, (248, 249, 250, 321, 298, 323, 304, 246, 320, 175, 313, 176, 103)),
    "aarch64": _Architecture(0xC00000B7, 198, (217, 218, 219, 280, 241, 282, 265, 104, 294, 105, 273, 106, 116)),
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
    families = [_instruction(_LOAD, _FIRST_ARGUMENT_OFFSET)]
    for family in _FAMILIES:
        families += [_instruction(_JUMP_EQUAL, family, if_false=1), _instruction(_RETURN, _ALLOW)]
    families.append(_instruction(_RETURN, _ERROR | errno.EAFNOSUPPORT))
    program += [_instruction(_JUMP_EQUAL, architecture.socket, if_false=len(families)), *families]
    program.append(_instruction(_RETURN, _ALLOW))
    return b"".join(program)


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
