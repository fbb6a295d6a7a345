"""Frozen data of E2B sandboxes: all processes in one sandbox are killed, and a path is copied from it into a clean one.

E2B has no mounts, so the data is copied through this process, as a tar that is filtered here and unpacked in the clean
sandbox.

Invariants:
- Only folders, regular files and symbolic links are copied, owned by root, without write and setuid permissions, and
  nothing is read or written outside the two paths.
- A path that leads through a symbolic link, or holds more than `max_bytes`, is refused, because only the agent can have
  caused it. So is one that cannot be unpacked where an empty archive can.
- Nothing that the frozen sandbox prints is trusted; the archive is read with Python's tarfile, and nothing is unpacked
  on this host.
"""

from __future__ import annotations

import base64
import binascii
import io
import posixpath
import secrets
import shlex
import tarfile
from typing import Final

from headrace.sandboxes.base import ExecResult, FrozenMount, Sandbox
from headrace.sandboxes.errors import ExecTimeout, FrozenPathRefused, SandboxFileError, SpecRefused

KILL_TIMEOUT_S: Final = 60.0
COPY_TIMEOUT_S: Final = 300.0
_EMPTY_TAR: Final = bytes(tarfile.RECORDSIZE)
_REFUSED: Final = 3
_SYSTEM_FOLDERS: Final = frozenset(("bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "usr"))

# The ancestors of the shell are envd and process 1. New processes may appear between two looks, so it looks again
# until it finds none.
_KILL_ALL: Final = """own=" 1 "; id=$$
while [ "$id" -gt 1 ]; do
  own="$own$id "
  while read -r key value; do [ "$key" = PPid: ] && parent=$value; done < "/proc/$id/status"
  id=$parent
done
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do
  found=
  for place in /proc/[0-9]*; do
    id=${place#/proc/}
    case "$own" in *" $id "*) continue;; esac
    [ -s "$place/cmdline" ] || [ -n "$(readlink "$place/exe" 2>/dev/null)" ] || continue
    kill -9 "$id" 2>/dev/null && found=1
  done
  [ -z "$found" ] && exit 0
done
exit 1"""

_ARCHIVE: Final = """path=%s; part=; IFS=/
for name in ${path#/}; do
  part="$part/$name"
  [ -L "$part" ] && { echo "leads through a symbolic link" >&2; exit 3; }
done
[ -e "$path" ] || { echo "No such file or directory" >&2; exit 3; }
[ -d "$path" ] || [ -f "$path" ] || { echo "neither a folder nor a regular file" >&2; exit 3; }
tar -cf - -C "$(dirname "$path")" -- "$(basename "$path")" 2>/dev/null | base64 -w 0"""


async def kill_all(sandbox: Sandbox) -> None:
    """Kill every process in a sandbox except E2B's own agent (envd). Raises ExecTimeout if new ones keep appearing."""
    result = await sandbox.exec(_KILL_ALL, user="root", cwd="/", timeout_s=KILL_TIMEOUT_S)
    if result.exit_code != 0:
        raise ExecTimeout("the processes of the sandbox multiply faster than they can be killed")


async def copy_frozen(source: Sandbox, target: Sandbox, mount: FrozenMount, *, max_bytes: int) -> None:
    """Copy `mount.path` of a frozen sandbox to `mount.target` of a clean one. Raises FrozenPathRefused, SpecRefused,
    and the errors that `Sandbox.exec` raises."""
    folder = posixpath.normpath(mount.target)
    if not mount.target.startswith("/") or folder.lstrip("/").split("/")[0] in {"", ".."} | _SYSTEM_FOLDERS:
        raise SpecRefused(f"target {mount.target!r} of frozen data: give an absolute path outside the system folders")
    result = await source.exec(
        _ARCHIVE % shlex.quote(posixpath.normpath(mount.path)),
        user="root",
        cwd="/",
        timeout_s=COPY_TIMEOUT_S,
        max_output_bytes=2 * max_bytes,
    )
    if result.exit_code == _REFUSED:
        reason = result.stderr.decode(errors="replace").strip()[:200]
        raise FrozenPathRefused(f"frozen path {mount.path!r}: {reason}")
    archive = filtered(result.stdout, folder, max_bytes=max_bytes, truncated=result.truncated)
    if (await _unpack(target, archive, folder)).exit_code == 0:
        return
    empty = await _unpack(target, _EMPTY_TAR, folder)
    if empty.exit_code != 0:
        raise SandboxFileError(f"frozen data cannot be unpacked: {empty.stderr.decode(errors='replace')[:500]}")
    again = await _unpack(target, archive, folder)
    if again.exit_code != 0:
        reason = again.stderr.decode(errors="replace")[:500]
        raise FrozenPathRefused(f"frozen path {mount.path!r}: cannot be unpacked: {reason}")


async def _unpack(target: Sandbox, archive: bytes, folder: str) -> ExecResult:
    """Unpack an archive whose members are below `folder`."""
    place = f"/tmp/.headrace-{secrets.token_hex(16)}"
    await target.write(place, archive)
    command = (
        f"mkdir -p {shlex.quote(folder)} && tar -xpf {place} -C / --no-same-owner; code=$?; rm -f {place}; exit $code"
    )
    return await target.exec(command, user="root", cwd="/", timeout_s=COPY_TIMEOUT_S)


def filtered(encoded: bytes, folder: str, *, max_bytes: int, truncated: bool = False) -> bytes:
    """Return a base64-encoded tar of an archive's safe members, with their top folder renamed to `folder`. Raises
    FrozenPathRefused for an archive that is damaged or larger than `max_bytes`."""
    if truncated:
        raise FrozenPathRefused(f"frozen data has more than {max_bytes} bytes")
    output = io.BytesIO()
    total, folders = 0, {""}
    try:
        data = io.BytesIO(base64.b64decode(encoded, validate=True))
        with tarfile.open(fileobj=data, mode="r:") as given, tarfile.open(fileobj=output, mode="w:") as taken:
            for member in given:
                _, _, inside = member.name.rstrip("/").partition("/")
                # Below folders of this archive only: a path that leads through one of its links is not unpacked.
                if posixpath.dirname(inside) not in folders or posixpath.basename(inside) in (".", ".."):
                    continue
                if member.isdir():
                    folders.add(inside)
                elif not (member.isreg() or member.issym()):
                    continue
                total += member.size
                if total > max_bytes:
                    raise FrozenPathRefused(f"frozen data has more than {max_bytes} bytes")
                safe = tarfile.TarInfo(posixpath.join(folder.lstrip("/"), inside) if inside else folder.lstrip("/"))
                safe.type, safe.linkname, safe.mtime = member.type, member.linkname, member.mtime
                safe.mode = member.mode & 0o555 | (0o500 if member.isdir() else 0o400)
                if member.isreg():
                    safe.type, safe.size = tarfile.REGTYPE, member.size
                    taken.addfile(safe, given.extractfile(member))
                else:
                    taken.addfile(safe)
    except (tarfile.TarError, binascii.Error, ValueError, OverflowError, EOFError) as error:
        raise FrozenPathRefused(f"frozen data is not a valid archive: {error}") from error
    return output.getvalue()
