"""Small hand-written images: tars, OCI layouts and archives, docker archives, with this host's own bash."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard

MAPS_MEMORY = tuple(int(part) for part in platform.release().split(".")[:2]) >= (6, 3)
"""True if this kernel shows files of a tmpfs with other ids (docs/sandboxes.md, Kernels)."""
needs_snapshots = pytest.mark.skipif(not MAPS_MEMORY, reason="snapshots of layers in memory need Linux 6.3")
TRUSTED: dict[str, Any] = {"filter": "tar"} if hasattr(tarfile, "tar_filter") else {}
"""Arguments of `extractall` for an archive of our own; Python has filters since 3.11.4."""

Entry = tuple[tarfile.TarInfo, bytes]
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]


def file(name: str, data: bytes = b"", **fields: Any) -> Entry:
    return entry(name, data, size=len(data), **fields)


def folder(name: str, **fields: Any) -> Entry:
    return entry(name, type=tarfile.DIRTYPE, **{"mode": 0o755, **fields})


def link(name: str, target: str) -> Entry:
    return entry(name, type=tarfile.SYMTYPE, linkname=target)


def hard_link(name: str, target: str) -> Entry:
    return entry(name, type=tarfile.LNKTYPE, linkname=target)


def entry(name: str, data: bytes = b"", **fields: Any) -> Entry:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def tar(entries: Iterable[Entry]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


BASE = ("/bin/bash", "/bin/cat", "/bin/ls", "/bin/sleep", "/bin/id", "/bin/mkdir", "/bin/rm", "/bin/touch")


@functools.cache
def base_entries(*more: str) -> tuple[Entry, ...]:
    """Return a root file system with bash, a few tools and `more` programs, dynamically linked, from this host."""
    names: dict[str, str] = {}
    for program in (*BASE, *more):
        names[program] = program
        listing = subprocess.run(("ldd", program), capture_output=True, text=True, check=True).stdout
        names.update({path: path for path in re.findall(r"/\S+", listing)})
    files = [file(f"usr{path}", Path(path).read_bytes(), mode=0o755) for path in names if not path.startswith("/usr/")]
    files += [file(path[1:], Path(path).read_bytes(), mode=0o755) for path in names if path.startswith("/usr/")]
    tops = sorted({path.split("/")[1] for path in names} - {"usr"})
    accounts = b"root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000:agent:/home/agent:/bin/bash\n"
    return (
        *(folder(name) for name in ("etc", "usr", "proc", "dev", "sys")),
        folder("tmp", mode=0o1777),
        folder("root", mode=0o700),
        folder("workspace", mode=0o777),
        folder("home/agent", uid=1000, gid=1000),
        *(link(top, f"usr/{top}") for top in tops),
        *files,
        file("etc/passwd", accounts, mode=0o644),
        file("etc/group", b"root:x:0:\nagent:x:1000:\n", mode=0o644),
        file("etc/release", b"base\n", mode=0o644),
    )


def compress(kind: str, data: bytes) -> bytes:
    if kind == "gzip":
        return gzip.compress(data, 1, mtime=0)
    if kind == "zstd":
        return zstandard.compress(data, 1)
    if kind == "xz":
        import lzma

        return lzma.compress(data, preset=0)
    return data


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


class Layout:
    """Files of an OCI image layout by name; tests change them to damage it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}
        self.manifests: list[dict[str, Any]] = []

    def blob(self, data: bytes) -> str:
        digest = sha256(data)
        self.files[f"blobs/{digest.replace(':', '/')}"] = data
        return digest

    def image(
        self,
        layers: Sequence[bytes],
        tag: str | None = None,
        *,
        compression: str = "gzip",
        settings: Mapping[str, Any] | None = None,
        architecture: str = ARCHITECTURE,
    ) -> Layout:
        """Add an image of plain layer tars, bottom first."""
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": dict(settings or {}),
            "rootfs": {"type": "layers", "diff_ids": [sha256(layer) for layer in layers]},
        }
        blobs = [self.blob(compress(compression, layer)) for layer in layers]
        manifest = {
            "schemaVersion": 2,
            "config": {"digest": self.blob(json.dumps(config).encode())},
            "layers": [{"digest": digest} for digest in blobs],
        }
        row: dict[str, Any] = {"digest": self.blob(json.dumps(manifest).encode())}
        if tag is not None:
            row["annotations"] = {"org.opencontainers.image.ref.name": tag}
        self.manifests.append(row)
        return self

    def all_files(self) -> dict[str, bytes]:
        return {**self.files, "index.json": json.dumps({"schemaVersion": 2, "manifests": self.manifests}).encode()}

    def write(self, target: Path) -> Path:
        for name, data in self.all_files().items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_bytes(data)
        return target

    def archive(self, target: Path, *, compression: str = "") -> Path:
        files = (file(name, data) for name, data in sorted(self.all_files().items()))
        target.write_bytes(compress(compression, tar([folder("blobs"), *files])))
        return target


def write_docker_archive(target: Path, images: Mapping[str, Sequence[bytes]]) -> Path:
    """Write the older format of `docker save`, in which a repeated layer is a link."""
    rows: list[dict[str, Any]] = []
    entries: list[Any] = []
    names: dict[bytes, str] = {}
    for tag, layers in images.items():
        config = {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": {"Env": ["KIND=docker"], "WorkingDir": "/workspace"},
            "rootfs": {"type": "layers", "diff_ids": [sha256(layer) for layer in layers]},
        }
        data = json.dumps(config).encode()
        config_name = f"{hashlib.sha256(data).hexdigest()}.json"
        entries.append(file(config_name, data))
        paths = []
        for layer in layers:
            identity = hashlib.sha256(tag.encode() + layer).hexdigest()
            if layer in names:
                entries.append(link(f"{identity}/layer.tar", f"../{names[layer]}"))
            else:
                names[layer] = f"{identity}/layer.tar"
                entries.append(file(names[layer], layer))
            paths.append(f"{identity}/layer.tar")
        rows.append({"Config": config_name, "RepoTags": [tag], "Layers": paths})
    target.write_bytes(tar([*entries, file("manifest.json", json.dumps(rows).encode())]))
    return target
