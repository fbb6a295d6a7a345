"""Lookup of one image in an OCI image layout, an OCI archive, or an archive of `docker save`.

Invariants:
- Manifests and configs are small, and their digests are checked before they are used. Layers are only located here;
  their digests are checked while they are unpacked.
- Names in these files are looked up in a table or built from checked hex digits, and never used as a path.
- Exactly one image is chosen: the one for this machine if there are several platforms, and the one with the requested
  tag if there are several tags.

Formats: OCI image-spec 1.1 (image-layout.md, image-index.md, manifest.md, config.md); the `manifest.json` of docker's
image tarballs (docker image save).
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

from headrace.sandboxes.errors import ImageRefused, ImageUnknown
from headrace.sandboxes.images.merged_tree import oci_architecture
from headrace.sandboxes.images.streams import FileRange, TarStream, members, split_name

MAX_LAYERS: Final = 127
_MAX_DOCUMENT_BYTES: Final = 4 << 20
_MAX_MEMBERS: Final = 10_000
_MAX_INDEX_DEPTH: Final = 4
_MAX_LINKS: Final = 8
_DIGEST: Final = re.compile(r"(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})")
_MEMBER: Final = re.compile(
    r"oci-layout|index\.json|manifest\.json|repositories|blobs(/.*)?|[0-9a-f]{64}\.(json|tar)|[0-9a-f]{64}(/.*)?"
)
_TAG: Final = "org.opencontainers.image.ref.name"
_FULL_NAME: Final = "io.containerd.image.name"


class LayerSource(NamedTuple):
    """Location of one layer's tar, which may be compressed, and its digests."""

    part: FileRange
    blob_digest: str | None
    """`algorithm:hex` of the file as stored, or None in docker's archives, which do not have it."""
    content_digest: str
    """Hex sha256 of the plain tar (the `diff_id`)."""


class ImagePlan(NamedTuple):
    """Layers and settings of the chosen image."""

    digest: str
    """`sha256:` digest of the image's config, which container tools use as the image's id."""
    layers: tuple[LayerSource, ...]
    """Bottom first, as in the config."""
    environment: dict[str, str]
    folder: str
    user: str


class Blobs(NamedTuple):
    """Files of a layout or archive by their names in it."""

    find: Callable[[str], FileRange | None]

    def document(self, name: str, digest: str | None = None) -> Any:
        """Return the parsed content of a JSON file. Raises ImageRefused if it is missing, too large or invalid, or does
        not match its digest."""
        part = self.find(name)
        if part is None:
            raise ImageRefused(f"damaged image: {name} is missing")
        with Path(part.path).open("rb") as file:
            file.seek(part.offset)
            data = file.read(_MAX_DOCUMENT_BYTES + 1 if part.size is None else min(part.size, _MAX_DOCUMENT_BYTES + 1))
        if len(data) > _MAX_DOCUMENT_BYTES:
            raise ImageRefused(f"damaged image: {name} is larger than {_MAX_DOCUMENT_BYTES} bytes")
        if digest is not None and hashlib.new(digest.split(":")[0], data).hexdigest() != digest.split(":")[1]:
            raise ImageRefused(f"damaged image: {name} does not match its digest")
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:
            raise ImageRefused(f"damaged image: {name} is not valid JSON") from error


def layout_blobs(folder: Path) -> Blobs:
    """Return the files of an OCI image layout folder."""

    def find(name: str) -> FileRange | None:
        path = folder / name
        return FileRange(str(path)) if path.is_file() else None

    return Blobs(find)


def may_hold_images(stream: TarStream) -> bool:
    """Return True if a tar's first entry suggests an archive of images, which `archive_blobs` should read."""
    for _, member in members(stream):
        name = "/".join(split_name(member.name))
        if name:
            return _MEMBER.fullmatch(name) is not None
    return False


def archive_blobs(path: str) -> Blobs | None:
    """Return the members of an uncompressed tar of images, or None for any other tar, such as a root file system."""
    found: dict[str, FileRange] = {}
    links: dict[str, str] = {}
    with Path(path).open("rb") as file:
        for _, member in members(_SeekableTar(file)):
            name = "/".join(split_name(member.name))
            if not name:
                continue
            if not _MEMBER.fullmatch(name):
                return None
            if len(found) + len(links) > _MAX_MEMBERS:
                raise ImageRefused(f"the image archive has more than {_MAX_MEMBERS} files")
            if member.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
                found[name] = FileRange(path, member.offset_data, member.size)
            elif member.issym() or member.islnk():
                base = posixpath.dirname(name) if member.issym() else ""
                links[name] = posixpath.normpath(posixpath.join(base, member.linkname))

    def find(name: str) -> FileRange | None:
        for _ in range(_MAX_LINKS):
            if name not in links:
                return found.get(name)
            name = links[name]
        return None

    return Blobs(find) if find("index.json") or find("manifest.json") else None


class _SeekableTar:
    """Uncompressed tar in which contents are skipped by seeking."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.last = b""

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, position: int) -> int:
        if position < self._file.tell():
            raise ImageRefused("damaged archive: a header has an impossible size")
        return self._file.seek(position)

    def read(self, size: int) -> bytes:
        if size > _MAX_DOCUMENT_BYTES:
            raise ImageRefused(f"unsafe archive: a header has {size} bytes")
        self.last = self._file.read(size)
        return self.last


def find_image(blobs: Blobs, tag: str | None) -> ImagePlan:
    """Return the image with this tag, or the only image. Raises ImageUnknown (the tag does not exist, or there are
    several images and no tag), ImageRefused."""
    try:
        if blobs.find("index.json") is not None:
            return _from_index(blobs, tag)
        images = blobs.document("manifest.json")
        chosen = [image for image in images if tag is None or _is_named(image.get("RepoTags") or [], tag)]
        if not chosen:
            raise ImageUnknown(f"no image {tag!r} in the archive")
        if len(chosen) > 1:
            names = [name for image in chosen for name in image.get("RepoTags") or []]
            raise ImageUnknown(f"the archive holds {len(chosen)} images: write `path:tag` with one of {names[:20]}")
        name = str(chosen[0]["Config"])
        digest = f"sha256:{posixpath.basename(name).removesuffix('.json')}"
        # Checks the digest.
        _blob_name(digest)
        rows = [(str(layer), None) for layer in chosen[0]["Layers"]]
        return _plan(blobs, digest, blobs.document(name, digest), rows)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ImageRefused(f"damaged image: a manifest is invalid: {error!r}") from error


def _from_index(blobs: Blobs, tag: str | None) -> ImagePlan:
    entries = blobs.document("index.json")["manifests"]
    if tag is None:
        is_single = len({entry["digest"] for entry in entries}) == 1
        names = sorted({name for entry in entries for name in _names(entry)})
        if not is_single and (names or not entries):
            raise ImageUnknown(f"the archive holds {len(entries)} images: write `path:tag` with one of {names[:20]}")
    else:
        entries = [entry for entry in entries if _is_named(_names(entry), tag)]
        is_single = len(entries) == 1
        if not entries:
            raise ImageUnknown(f"no image {tag!r} in the archive")
    entry = entries[0] if is_single else _choose_platform(entries)
    for _ in range(_MAX_INDEX_DEPTH):
        manifest = blobs.document(_blob_name(entry["digest"]), entry["digest"])
        if "manifests" not in manifest:
            digest = manifest["config"]["digest"]
            config = blobs.document(_blob_name(digest), digest)
            rows = [(_blob_name(layer["digest"]), layer["digest"]) for layer in manifest["layers"]]
            return _plan(blobs, digest, config, rows)
        entry = _choose_platform(manifest["manifests"])
    raise ImageRefused(f"damaged image: indexes are nested deeper than {_MAX_INDEX_DEPTH}")


def _names(entry: Mapping[str, Any]) -> list[str]:
    notes = entry.get("annotations") or {}
    return [str(notes[name]) for name in (_TAG, _FULL_NAME) if name in notes]


def _is_named(names: Sequence[str], tag: str) -> bool:
    return any(name == tag or name.endswith((f":{tag}", f"/{tag}")) for name in names)


def _choose_platform(entries: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    wanted = oci_architecture()
    for entry in entries:
        platform = entry.get("platform") or {"architecture": wanted, "os": "linux"}
        if (platform.get("architecture"), platform.get("os")) == (wanted, "linux"):
            return entry
    raise ImageRefused(f"the image has no variant for linux/{wanted}")


def _blob_name(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ImageRefused(f"damaged image: invalid digest {digest[:80]!r}")
    return f"blobs/{digest.replace(':', '/')}"


def _plan(blobs: Blobs, digest: str, config: Mapping[str, Any], rows: Sequence[tuple[str, str | None]]) -> ImagePlan:
    if config.get("architecture", oci_architecture()) != oci_architecture() or config.get("os", "linux") != "linux":
        raise ImageRefused(
            f"the image is for {config.get('os')}/{config.get('architecture')}, not linux/{oci_architecture()}"
        )
    contents = config["rootfs"]["diff_ids"]
    if len(contents) != len(rows) or not 0 < len(rows) <= MAX_LAYERS:
        raise ImageRefused(
            f"damaged image: {len(rows)} layers, {len(contents)} digests; the numbers must be equal, 1 to {MAX_LAYERS}"
        )
    layers = []
    for (name, blob_digest), content in zip(rows, contents, strict=True):
        part = blobs.find(name)
        if part is None:
            raise ImageRefused(f"damaged image: layer {name[:100]} is missing")
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", content):
            raise ImageRefused(f"damaged image: invalid digest {content[:80]!r}")
        layers.append(LayerSource(part, blob_digest, content.removeprefix("sha256:")))
    settings = config.get("config") or {}
    pairs = (str(line).partition("=") for line in settings.get("Env") or [])
    return ImagePlan(
        digest=digest,
        layers=tuple(layers),
        environment={name: value for name, _, value in pairs if name},
        folder=str(settings.get("WorkingDir") or "/"),
        user=str(settings.get("User") or "root"),
    )
