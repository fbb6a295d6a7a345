"""Restores the pytest sections of pyproject.toml and setup.cfg that a patch changes.

Invariant: the result is provably the patched file with the sections of the base. Where that cannot be proven (sections
with another spelling, a file that does not parse) there is no result, and the whole change is dropped.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

PYPROJECT: Final = "pyproject.toml"
SETUP_CFG: Final = "setup.cfg"
SECTIONED: Final = (PYPROJECT, SETUP_CFG)
"""Names of files that have both test sections and others."""

_TOML_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?")
_INI_HEADER = re.compile(r"\[([^\[\]]+)\]")
_INI_SECTIONS: Final = ("tool:pytest", "pytest")


def with_base_sections(name: str, base: str, new: str) -> str | None:
    """Return `new` with the test sections of `base`; None if that is not provable. `name` is one of SECTIONED."""
    if name == SETUP_CFG:
        for line in f"{base}\n{new}".split("\n"):
            # Some parser could read such a line as a test section although it is not written as one.
            named = line.strip().startswith("[") and "pytest" in line.lower()
            if (named and line not in [f"[{section}]" for section in _INI_SECTIONS]) or "\r" in line or "\f" in line:
                return None
        wanted = [text for header, text in _chunks(base, _INI_HEADER) if header in _INI_SECTIONS]
        if wanted == [text for header, text in _chunks(new, _INI_HEADER) if header in _INI_SECTIONS]:
            return new
        rest = [text for header, text in _chunks(new, _INI_HEADER) if header not in _INI_SECTIONS]
        return "".join(map(_ended, rest + wanted))
    before, after = _parse_toml(base), _parse_toml(new)
    if before is None or after is None:
        return None
    if before[1] == after[1]:
        return new
    own = [text for header, text in _chunks(new, _TOML_HEADER) if not _is_test_table(header)]
    tests = [text for header, text in _chunks(base, _TOML_HEADER) if _is_test_table(header)]
    spliced = "".join(map(_ended, own + tests))
    return spliced if _parse_toml(spliced) == (after[0], before[1]) else None


def _parse_toml(text: str) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Parse a document into the part without test tables, and these; None if it does not parse."""
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return None
    tool = document.get("tool")
    if not isinstance(tool, dict):
        return document, {}
    tests = {key: value for key, value in tool.items() if key.startswith("pytest")}
    rest = {key: value for key, value in tool.items() if key not in tests}
    others = {key: value for key, value in document.items() if key != "tool"}
    return (others | {"tool": rest} if rest else others), tests


def _is_test_table(header: str) -> bool:
    parts = [part.strip().strip("\"'") for part in header.split(".")]
    return parts[0] == "tool" and len(parts) > 1 and parts[1].startswith("pytest")


def _chunks(text: str, header: re.Pattern[str]) -> list[tuple[str, str]]:
    """Split a text before every header line: (name of the section, its text with the header)."""
    chunks: list[tuple[str, list[str]]] = [("", [])]
    for line in text.splitlines(keepends=True):
        match = header.fullmatch(line.rstrip("\n"))
        if match:
            chunks.append((match[1], []))
        chunks[-1][1].append(line)
    return [(name, "".join(lines)) for name, lines in chunks]


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"
