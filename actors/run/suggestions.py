"""Suggest the key that somebody meant who wrote one that does not exist."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def suggestion(model: type[BaseModel], path: Sequence[str]) -> str | None:
    """The dotted key of `model` nearest to the unknown one: alike in the same table, of the same name in another, or
    alike anywhere; None when nothing is near."""
    *table, name = path
    keys = list(_keys(model))
    beside = [key for key in keys if key[:-1] == tuple(table)]
    for among in (beside, keys):
        # Named in another table before alike in any: `steps` is `training.steps`.
        if named := [key for key in among if key[-1] == name]:
            return ".".join(named[0]) if len(named) == 1 else None
        names = {key[-1]: key for key in reversed(among)}
        if near := get_close_matches(name, names, n=1, cutoff=0.75):
            return ".".join(names[near[0]])
    return None


def _keys(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """All keys, tables too."""
    for name, field in model.model_fields.items():
        yield (*above, name)
        for part in _parts(field.annotation):
            yield from _keys(part, (*above, name))


def _parts(annotation: Any) -> Iterator[type[BaseModel]]:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind
