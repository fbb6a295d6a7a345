"""The sections of pyproject.toml and setup.cfg that tell pytest what to do: always the base's, whatever a patch says.

Invariant: a text comes out only when it provably is the patch's file with the base's sections in it. Where that cannot
be shown (sections spelt in another way, a file that does not parse) nothing comes out, and the whole change is dropped.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, Final

PYPROJECT: Final = "pyproject.toml"
SETUP_CFG: Final = "setup.cfg"
SECTIONED: Final = (PYPROJECT, SETUP_CFG)
"""Names of files of which only sections are the tests'."""

_TOML_HEADER = re.compile(r"\s*\[\[?\s*([^\[\]]+?)\s*\]\]?\s*(?:#.*)?")
_INI_HEADER = re.compile(r"\[([^\[\]]+)\]")
_INI_SECTIONS: Final = ("tool:pytest", "pytest")


def with_base_sections(name: str, base: str, new: str) -> str | None:
    """`new` with the test sections of `base`; None when that cannot be done soundly. `name` is one of SECTIONED."""
    return _pyproject(base, new) if name == PYPROJECT else _setup_cfg(base, new)


def _pyproject(base: str, new: str) -> str | None:
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
    """A document without its test tables, and those; None when it does not parse."""
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


def _setup_cfg(base: str, new: str) -> str | None:
    if any(_is_odd_header(line) for text in (base, new) for line in text.split("\n")):
        return None
    before = [text for header, text in _chunks(base, _INI_HEADER) if header in _INI_SECTIONS]
    after = [text for header, text in _chunks(new, _INI_HEADER) if header in _INI_SECTIONS]
    if before == after:
        return new
    own = [text for header, text in _chunks(new, _INI_HEADER) if header not in _INI_SECTIONS]
    return "".join(map(_ended, own + before))


def _is_odd_header(line: str) -> bool:
    """A line that some parser could take for a test section though it is not written as one."""
    stripped = line.strip()
    named = stripped.startswith("[") and "pytest" in stripped.lower()
    return (named and line not in [f"[{name}]" for name in _INI_SECTIONS]) or "\r" in line or "\f" in line


def _chunks(text: str, header: re.Pattern[str]) -> list[tuple[str, str]]:
    """The text cut before every header line: (name of the section, its text with the header)."""
    chunks: list[tuple[str, list[str]]] = [("", [])]
    for line in text.splitlines(keepends=True):
        match = header.fullmatch(line.rstrip("\n"))
        if match:
            chunks.append((match[1], []))
        chunks[-1][1].append(line)
    return [(name, "".join(lines)) for name, lines in chunks]


def _ended(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"
