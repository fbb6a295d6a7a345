"""Wording of the kernel's refusals for people."""

from __future__ import annotations

import errno


def reason_of(error: OSError) -> str:
    """Name of the error, where it happened, and its text: `EBUSY: /sys/fs/cgroup/x: Device or resource busy`."""
    name = errno.errorcode.get(error.errno or 0, "")
    where = "" if error.filename is None else str(error.filename)
    return ": ".join(part for part in (name, where, error.strerror or str(error)) if part)
