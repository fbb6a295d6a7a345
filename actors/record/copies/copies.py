"""The control node's side: the copies of one node's files of a run, in `nodes/NODE` of the run's state folder.

Invariants:
- The copy of an appended file is a beginning of its original, byte for byte, under the original's name. Its size says
  where to go on, so that a kill of either side repeats nothing and leaves no gap.
- A copy is removed when its original has made room for younger ones, or when its compressed form is here. Others may
  remove copies that do not change any more: `received.json` remembers that they were received. Copies of a lost node
  stay.
- Bytes that were seen on the node and are gone before they were copied are counted in `received.json`, and reported.
- A whole file appears under its name when it is complete.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import orjson

from headrace.actors.record.copies.pages import (
    COMPRESSED,
    NAME,
    NodePage,
    Piece,
    ReceivedFile,
    is_appended,
    is_kept,
    is_older,
    mark_of,
    number_of,
    older_name,
    series_of,
)

RECEIVED: Final = "received.json"

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Losses:
    """What was lost of a node's files: bytes, and files of which bytes are missing."""

    bytes: int = 0
    files: int = 0


class NodeCopies:
    """Copies in this folder, which has one writer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, ReceivedFile] = {}
        self._listed: dict[str, ReceivedFile] = {}
        """Appended files of the last settled page, by name."""
        self._complete: set[str] = set()
        """Files that do not change any more, and have been copied to their end."""
        self.losses = Losses()
        recorded = self._recorded_before()
        self._complete |= recorded.keys()
        self._find_held(recorded)
        self._recorded = self._document()

    def held(self) -> dict[str, ReceivedFile]:
        """Return what is held, by name."""
        return dict(self._held)

    def apply(self, page: NodePage) -> None:
        """Write the pieces of a page, after the renames that it shows. Raises OSError; then the rest of the page is
        asked for again. Raises ValueError for a name that is not one of a copied file."""
        for name in (*page.files, *page.compressed, *(piece.name for piece in page.pieces)):
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a file that nodes send")
        try:
            if page.is_settled:
                self._follow_renames(page)
                self._cut(page)
            for piece in page.pieces:
                (self._append if is_appended(piece.name) else self._stage)(piece)
            if page.is_settled:
                self._drop_removed(page)
        except BaseException:
            # Whatever was written counts.
            self._find_held(dict(self._held))
            raise
        self._record()

    def _recorded_before(self) -> dict[str, ReceivedFile]:
        try:
            document = orjson.loads((self._folder / RECEIVED).read_bytes())
            self.losses = Losses(**document["losses"])
            return {name: ReceivedFile(mark, size) for name, (mark, size) in document["kept"].items()}
        except FileNotFoundError:
            return {}
        except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
            logger.warning("%s is damaged (%r): files that were removed here are copied again", self._folder, error)
            return {}

    def _find_held(self, known: dict[str, ReceivedFile]) -> None:
        """Find out what is held: from the copies themselves, and from what is known of those that are gone."""
        self._held = dict(self._on_disk(known))
        self._complete &= known.keys()
        self._held |= {name: known[name] for name in self._complete if name not in self._held}

    def _on_disk(self, known: dict[str, ReceivedFile]) -> Iterator[tuple[str, ReceivedFile]]:
        for path in sorted(self._folder.glob("*/*")):
            name = f"{path.parent.name}/{path.name}"
            if not NAME.fullmatch(name):
                continue
            with suppress(FileNotFoundError), path.open("rb") as file:
                size = file.seek(0, 2)
                if not is_appended(name):
                    if (whole := known.get(name)) is not None and whole.size == size:
                        yield name, whole
                elif (mark := mark_of(name, file)) is not None:
                    yield name, ReceivedFile(mark, size)
                else:
                    # Less than a line, left by a kill: nobody could tell what it is the beginning of.
                    path.unlink()
                    known.pop(name, None)

    def _follow_renames(self, page: NodePage) -> None:
        """Rename copies as their originals were, and count what is gone."""
        names = {one.mark: name for name, one in page.files.items()}
        for name, one in self._listed.items():
            if one.mark not in names and not self._is_compressed(name, page):
                self._count(one)
        self._listed = dict(page.files)
        for name, one in sorted(self._held.items(), reverse=True):
            if not is_appended(name) or self._held.get(name) != one:
                continue
            wanted = names.get(one.mark)
            if wanted is None and (name in page.files or (not is_older(name) and self._new_compressed(name, page))):
                # The original is gone, and another file may have its name: as if it had been rotated first.
                wanted = self._unused_name(name, page)
            taken = self._held.get(wanted or name)
            if wanted is None or wanted == name or (taken is not None and taken.mark == one.mark):
                continue
            if taken is not None:
                self._rename(wanted, self._unused_name(wanted, page))
            self._rename(name, wanted)

    def _is_compressed(self, name: str, page: NodePage) -> bool:
        """Return whether a file that is gone may be one of those whose compressed form has not been copied yet."""
        return f"{name}{COMPRESSED}" in page.compressed or bool(self._new_compressed(name, page))

    def _new_compressed(self, name: str, page: NodePage) -> list[str]:
        """Return the names that files of a series had before they were compressed, if those are not held in any form,
        the oldest first."""
        found = (other.removesuffix(COMPRESSED) for other in page.compressed if other not in self._held)
        same = (other for other in found if is_older(other) and series_of(other) == series_of(name))
        return sorted((other for other in same if other not in self._held), key=number_of)

    def _unused_name(self, name: str, page: NodePage) -> str:
        """Return the name that a file has after a rotation: the one of its compressed form if there may be one, else
        one that is not used."""
        if new := self._new_compressed(name, page):
            return new[0]
        series = series_of(name)
        used = (other.removesuffix(COMPRESSED) for other in (*self._held, *page.files, *page.compressed))
        numbers = [number_of(other) for other in used if series_of(other) == series and is_older(other)]
        return older_name(series, max(numbers, default=0) + 1)

    def _rename(self, name: str, wanted: str) -> None:
        with suppress(FileNotFoundError):
            (self._folder / name).rename(self._folder / wanted)
        self._held[wanted] = self._held.pop(name)
        self._complete.discard(name)

    def _count(self, gone: ReceivedFile) -> None:
        """Count what is missing of a file that the node does not have any more."""
        received = max((one.size for one in self._held.values() if one.mark == gone.mark), default=0)
        if received < gone.size:
            self.losses.bytes += gone.size - received
            self.losses.files += 1
            logger.warning(
                "%d bytes of a file of node %s are lost: it was removed there before they were copied",
                gone.size - received,
                self._folder.name,
            )

    def _cut(self, page: NodePage) -> None:
        """Cut copies whose originals have become shorter, as after a crash of the node's disk."""
        for name, one in page.files.items():
            have = self._held.get(name)
            if have is not None and have.mark == one.mark and have.size > one.size:
                with suppress(FileNotFoundError):
                    os.truncate(self._folder / name, one.size)
                self._held[name] = one

    def _append(self, piece: Piece) -> None:
        have, path = self._held.get(piece.name), self._folder / piece.name
        size = 0 if have is None else have.size
        if piece.offset != size or (have is not None and have.mark != piece.mark):
            # The answer to an older question, or a rename that is still to be followed.
            return
        if have is not None and not path.exists():
            # It was removed here before it was complete.
            del self._held[piece.name]
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            if file.tell() != size:
                raise OSError(f"{path} has {file.tell()} bytes and not {size}: another process has changed it")
            file.write(piece.data)
        self._held[piece.name] = ReceivedFile(piece.mark, size + len(piece.data))

    def _stage(self, piece: Piece) -> None:
        """Add a piece of a whole file to its staged part, which takes the file's name when it is complete."""
        path = self._folder / piece.name
        part = path.with_name(f".{path.name}.part")
        if piece.offset == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(piece.data)
        elif (
            self._held.get(piece.name) != ReceivedFile(piece.mark, piece.offset)
            or not part.exists()
            or part.stat().st_size < piece.offset
        ):
            # Another version, or a part that is lost: from the beginning.
            self._held.pop(piece.name, None)
            return
        else:
            with part.open("ab") as file:
                file.truncate(piece.offset)
                file.write(piece.data)
        self._held[piece.name] = ReceivedFile(piece.mark, piece.offset + len(piece.data))
        self._complete.discard(piece.name)
        if piece.is_end:
            part.replace(path)
            self._complete |= {piece.name} if is_kept(piece.name) else set()

    def _drop_removed(self, page: NodePage) -> None:
        """Remove the copies of logs that made room on the node, and those of files whose compressed form is here.
        Forget what is neither here nor there."""
        self._complete |= {name for name, one in page.files.items() if is_older(name) and self._held.get(name) == one}
        oldest: dict[str, int] = {}
        for name in filter(is_older, page.files):
            oldest[series_of(name)] = min(number_of(name), oldest.get(series_of(name), number_of(name)))
        for name in [name for name in self._held if name not in page.files and name not in page.compressed]:
            path = self._folder / name
            # The oldest go first: a younger one whose original is gone was set aside here.
            made_room = name.startswith("logs/") and is_older(name) and number_of(name) < oldest.get(series_of(name), 0)
            if is_appended(name) and (made_room or path.with_name(f"{path.name}{COMPRESSED}").exists()):
                path.unlink(missing_ok=True)
            if is_kept(name) and not path.exists():
                del self._held[name]
                self._complete.discard(name)

    def _record(self) -> None:
        """Remember which files are complete, in case that their copies are removed; other copies say it themselves."""
        document = self._document()
        if document != self._recorded:
            self._folder.mkdir(parents=True, exist_ok=True)
            staged = self._folder / f".{RECEIVED}"
            staged.write_bytes(document)
            staged.replace(self._folder / RECEIVED)
            self._recorded = document

    def _document(self) -> bytes:
        kept = {name: (self._held[name].mark, self._held[name].size) for name in sorted(self._complete)}
        return orjson.dumps({"kept": kept, "losses": asdict(self.losses)})
