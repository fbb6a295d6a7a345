"""The registry of plug-ins by name, both headrace's own and those of other packages.

A name is one of headrace's own, `package.module:Name`, or an entry point of an installed distribution. A name that
leads to no plug-in, to more than one, or to an object of another kind is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

T = TypeVar("T")


class PartRefused(ValueError):
    """A name does not lead to one plug-in of its kind. The message gives the reason and the available names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry(Generic[T]):
    """All plug-ins of one kind. `kind` is the name of the kind in messages, `group` the entry-point group of its
    plug-ins."""

    kind: str
    group: str
    own: Mapping[str, T]
    accept: Callable[[object], T]
    """Converts an object from another package to a plug-in. Raises TypeError, saying what is missing."""

    def names(self) -> tuple[str, ...]:
        """Return the names of headrace's own plug-ins, then those of entry points."""
        return (*self.own, *sorted({point.name for point in self._points()}))

    def find(self, name: str) -> T:
        """Return the plug-in with this name. Raises PartRefused."""
        if ":" in name:
            module, _, path = name.partition(":")
            try:
                found: object = import_module(module)
                for part in path.split("."):
                    found = getattr(found, part)
            except Exception as error:
                is_absent = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
                hint = "; put its folder on PYTHONPATH, or install it" if is_absent else ""
                raise PartRefused(f"{self.kind} {name!r}: {_reason(error)}{hint}") from error
            return self._accepted(name, found)
        points = [point for point in self._points() if point.name == name]
        if name in self.own:
            if points:
                raise PartRefused(
                    f"{self.kind} {name!r} exists twice: in headrace and in {_origins(points)}; rename one"
                )
            return self.own[name]
        if not points:
            raise PartRefused(
                f"there is no {self.kind} {name!r}; available: {', '.join(self.names())}, or package.module:Name for "
                "one of your own"
            )
        if len(points) > 1:
            raise PartRefused(
                f"{self.kind} {name!r} exists twice: in {_origins(points)}; name it as package.module:Name"
            )
        try:
            found = points[0].load()
        except Exception as error:
            raise PartRefused(f"{self.kind} {name!r} of {_origins(points)}: {_reason(error)}") from error
        return self._accepted(name, found)

    def _points(self) -> list[EntryPoint]:
        return list(entry_points(group=self.group))

    def _accepted(self, name: str, found: object) -> T:
        try:
            return self.accept(found)
        except TypeError as error:
            raise PartRefused(f"{name!r} is not a valid {self.kind}: {error}") from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _origins(points: list[EntryPoint]) -> str:
    return " and ".join(sorted(point.dist.name if point.dist else point.value for point in points))
