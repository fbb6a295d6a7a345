"""The scripts, styles and pictures of the page."""

from __future__ import annotations

import hashlib
import mimetypes

from headrace.actors.telemetry.page.rendering import HERE
from headrace.actors.telemetry.slow.waterfall_html import STYLE


def static_files() -> dict[str, tuple[bytes, str, str]]:
    """Return content, type and digest of the files of the page, by name."""
    files = {path.name: path.read_bytes() for path in (HERE / "static").iterdir()} | {"waterfall.css": STYLE.encode()}
    return {
        name: (body, mimetypes.guess_type(name)[0] or "text/plain", hashlib.sha256(body).hexdigest()[:32])
        for name, body in files.items()
    }
