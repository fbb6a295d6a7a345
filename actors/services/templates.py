"""Templates of a recipe's texts, in Jinja with a sandboxed environment."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from jinja2 import StrictUndefined, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2 import Template

_PLACE: Final = "\ufdd4"
"""Stands for a value in a template; a noncharacter of Unicode."""
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)


@lru_cache(maxsize=256)
def compiled(text: str) -> Template:
    """Return the compiled template. Raises ValueError with the line and the reason."""
    try:
        return _ENVIRONMENT.from_string(text)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ValueError(f"not a valid Jinja template{f' (line {line})' if line else ''}: {error}") from error


def check_names(text: str, names: tuple[str, ...]) -> None:
    """Raise ValueError if a template is not valid, or uses other names than these."""
    compiled(text)
    unknown = sorted(meta.find_undeclared_variables(_ENVIRONMENT.parse(text)) - set(names))
    if unknown:
        raise ValueError(f"unknown name {unknown[0]} in the template; the names are {', '.join(names)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedText:
    """A text, and the characters `[start, end)` of each warning in it."""

    text: str
    warnings: tuple[tuple[int, int], ...] = ()


def filled_around(template: str, name: str, value: MarkedText, **others: object) -> MarkedText:
    """Return a template's text with a marked value. If the template does not write that value once and unchanged, its
    warnings are not known in the result, which then has none. Raises ValueError as `filled` does."""
    text = filled(template, **{name: value.text}, **others)
    if not value.warnings:
        return MarkedText(text=text)
    # The value itself cannot show where it is: an environment's output may repeat the template's own words.
    before, *after = filled(template, **{name: _PLACE}, **others).split(_PLACE)
    if len(after) != 1 or text != before + value.text + after[0]:
        return MarkedText(text=text)
    shift = len(before)
    return MarkedText(text=text, warnings=tuple((start + shift, end + shift) for start, end in value.warnings))


def filled(text: str, **values: object) -> str:
    """Return a template's text with these values. Raises ValueError for an unknown name or an unfit value."""
    try:
        return compiled(text).render(**values)
    except (TemplateError, TypeError) as error:
        raise ValueError(f"the template cannot be filled: {error}") from error
