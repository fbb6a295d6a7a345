"""Exports of finished sessions: their forms, and the folder into which a gateway writes each session.

Invariants:
- A document is made piece by piece, and the folder gets one document at a time, so that memory does not grow with the
  number of sessions that are finished together.
- A file of the folder is complete whenever it is there, also after kill -9: it is staged, then renamed.
- A session's file is there before its finish is answered, unless it could not be written: that is logged once, counted
  always, and never fails the finish.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import quote

from headrace.buffer.primitives.durable_files import PARTIAL, replace_from
from headrace.sandboxes.host.private_folders import make_missing
from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import Session, SessionId
from headrace.serve.gateway.errors import OptionRefused
from headrace.serve.gateway.exports import json_pieces
from headrace.serve.gateway.exports.atif import AtifWriter
from headrace.serve.gateway.exports.export_form import ExportForm
from headrace.serve.gateway.exports.prompt_messages import MessageShape
from headrace.serve.gateway.exports.rollout_details import rollout_details
from headrace.serve.gateway.http import codec
from headrace.serve.gateway.rendering.render import Renderer

logger = logging.getLogger(__name__)

_SUFFIX: Final = ".json"
_MAX_NAME_CHARACTERS: Final = 200


class Exporter:
    """Makes the documents of finished sessions. Several threads may use one exporter."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    @cached_property
    def _atif(self) -> AtifWriter:
        return AtifWriter(self._renderer.decode, MessageShape.of(self._renderer))

    def pieces(self, form: ExportForm, session: Session, report: SessionReport) -> Iterator[bytes]:
        """Yield a session's document as JSON. For ATIF, the session must have kept its answers."""
        match form:
            case ExportForm.ROWS:
                found = codec.plain_pieces(session, report)
            case ExportForm.ATIF:
                found = self._atif.pieces(session, report)
            case ExportForm.ROLLOUT_DETAILS:
                found = rollout_details(session)
        return json_pieces.joined(found)


class ExportFolder:
    """Folder with a file for each finished session, in one form; it belongs to one gateway. `failed` counts the
    sessions whose file could not be written. Raises OptionRefused for a folder that cannot be used."""

    def __init__(self, folder: Path, form: ExportForm, exporter: Exporter) -> None:
        self.failed = 0
        self.form = form
        self._folder = folder
        self._exporter = exporter
        self._one_at_a_time = asyncio.Lock()
        try:
            make_missing(folder)
            with tempfile.TemporaryFile(dir=folder) as probe:
                probe.write(b"probe")
            for left in folder.glob(f"*{_SUFFIX}{PARTIAL}"):
                left.unlink(missing_ok=True)
        except OSError as error:
            raise OptionRefused(
                f"--export {folder}: {error.strerror}; choose a folder that this user can write"
            ) from error

    def path_of(self, session_id: SessionId) -> Path:
        """Return the path of a session's file. Ids may have slashes, and may be longer than a file's name."""
        name = quote(session_id, safe="")
        if len(name) > _MAX_NAME_CHARACTERS:
            digest = hashlib.sha256(session_id.encode()).hexdigest()
            name = f"{name[: _MAX_NAME_CHARACTERS - 33]}-{digest[:32]}"
        return self._folder / f"{name}{_SUFFIX}"

    async def write(self, session: Session, report: SessionReport) -> None:
        """Write the file of a closed session, or replace that of an earlier one with the same id. Never fails."""
        session_id = session.spec.session_id
        path = self.path_of(session_id)
        async with self._one_at_a_time:
            try:
                await asyncio.to_thread(lambda: replace_from(path, self._exporter.pieces(self.form, session, report)))
            except Exception as error:
                self.failed += 1
                with suppress(OSError):
                    path.with_name(path.name + PARTIAL).unlink(missing_ok=True)
                if self.failed == 1:
                    # A full disk needs no traceback; anything else is a bug.
                    defect = None if isinstance(error, OSError) else error
                    event = "session %s is not exported: %s; further failures are only counted"
                    logger.error(event, session_id, error, exc_info=defect)

    def close(self) -> None:
        """Log how many sessions were not exported, if any."""
        if self.failed:
            logger.warning("%d sessions were not exported to %s", self.failed, self._folder)
