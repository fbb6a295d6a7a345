"""Suggestion of a similar key for an unknown key of a recipe."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, get_args

from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def suggestion(model: type[BaseModel], path: Sequence[str]) -> str | None:
    """Return the dotted key of `model` that is nearest to the unknown one, or None if no key is similar. Similar keys
    of the same table come first, then keys of the same name, then similar keys of other tables."""
    *table, name = path
    keys = list(_keys(model))
    beside = [key for key in keys if key[:-1] == tuple(table)]
    for among in (beside, keys):
        # The same name in another table is better than a similar name: `steps` means `training.steps`.
        if named := [key for key in among if key[-1] == name]:
            return ".".join(named[0]) if len(named) == 1 else None
        names = {key[-1]: key for key in reversed(among)}
        if near := get_close_matches(name, names, n=1, cutoff=0.75):
            return ".".join(names[near[0]])
    return None


def _keys(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all keys, tables included."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        for kind in (field.annotation, *get_args(field.annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _keys(kind, (*above, name))
