"""The templates of the page, and how numbers and times are written in them.

Invariants:
- Every text is escaped by the environment; `harmless` also makes control and reordering characters visible.
- An undefined name in a template is an error, never an empty text.
"""

from __future__ import annotations

import hashlib
import math
import mimetypes
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeGuard

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from headrace.actors.telemetry.page.text import MAX_NAME, name, shown
from headrace.actors.telemetry.slow.timeline_html import TIMELINE_STYLE
from headrace.actors.telemetry.slow.waterfall_html import STYLE

HERE: Final = Path(__file__).parent
NOTHING: Final = "\u2013"


def make_environment() -> Environment:
    """Return the environment of the templates."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "duration": duration,
        "share": share,
        "number": number,
        "whole": whole,
        "bytes": size,
        "instant": instant,
        "name": name_of,
        "shown": lambda text: shown(str(text)),
        "label": label,
    }
    return environment


def name_of(value: object, limit: int = MAX_NAME) -> Markup:
    """Return a name that an agent or a task may have chosen: on one line, isolated from the direction of the rest."""
    return Markup("<bdi>{}</bdi>").format(name(value, limit))


def is_finite(value: object) -> TypeGuard[float]:
    """Return True for a finite number: files may be damaged."""
    return isinstance(value, int | float) and math.isfinite(value)


def duration(seconds: object) -> str:
    """Return seconds with a unit that suits them; a dash for anything else."""
    if not is_finite(seconds):
        return NOTHING
    if seconds < 0.1:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.0005 else "0 s"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def share(value: object, digits: int = 0) -> str:
    """Return a share in per cent; a dash for anything else."""
    return NOTHING if not is_finite(value) else f"{100 * value:.{digits}f} %"


def number(value: object, digits: int = 2) -> str:
    """Return a number with this many digits after the point, very large ones in short; a dash for anything else."""
    if not is_finite(value):
        return NOTHING
    return f"{value:,.{digits}f}".replace(",", "\u202f") if abs(value) < 1e9 else f"{value:.3g}"


def whole(value: object) -> str:
    """Return a whole number with thin spaces between thousands; a dash for anything else."""
    return f"{int(value):,}".replace(",", "\u202f") if is_finite(value) else NOTHING


def size(value: object) -> str:
    """Return bytes with a unit that suits them."""
    if not is_finite(value):
        return NOTHING
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


def instant(at_s: object) -> Markup:
    """Return a time in UTC as a `time` element; a dash for anything else."""
    try:
        moment = datetime.fromtimestamp(at_s, UTC) if is_finite(at_s) and at_s else None
    except (OverflowError, OSError, ValueError):
        moment = None
    if moment is None:
        return escape(NOTHING)
    text = moment.strftime("%Y-%m-%d %H:%M:%S")
    return Markup('<time datetime="{}Z">{}</time>').format(text.replace(" ", "T"), text)


def label(value: Any) -> str:
    """Return a value of a label as text."""
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def static_files() -> dict[str, tuple[bytes, str, str]]:
    """Return content, type and digest of the files of the page, by name."""
    files = {path.name: path.read_bytes() for path in (HERE / "static").iterdir()}
    files["waterfall.css"] = (STYLE + TIMELINE_STYLE).encode()
    return {
        name: (body, mimetypes.guess_type(name)[0] or "text/plain", hashlib.sha256(body).hexdigest()[:32])
        for name, body in files.items()
    }
