"""Tables of the names and shapes of published models' parameters.

A table has one line for each shape and each name without its numbers, with the numbers that occur: parameters of 30,000
experts are 30 lines. Every name of a line has every combination of its numbers.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from headrace.policies.tensors import TensorSpec

Shapes = Mapping[str, tuple[int, ...]]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
TABLES = Path(__file__).resolve().parents[1] / "golden" / "parameter_tables.json"
"""Tables by model, which `make_parameter_tables.py` beside them writes."""
TABLED_MODELS = ("Qwen3-4B", "Qwen3-30B-A3B", "Qwen3.6-35B-A3B", "GLM-4.7-Flash")
"""Models of `published_models` that have tables."""


def table_of(shapes: Shapes) -> list[dict[str, Any]]:
    """Return the table of parameters."""
    lines: dict[tuple[str, tuple[int, ...]], list[list[int]]] = {}
    for name, shape in shapes.items():
        lines.setdefault((_NUMBER.sub("*", name), shape), []).append([int(number) for number in _NUMBER.findall(name)])
    table = []
    for (name, shape), numbers in lines.items():
        axes = [sorted(set(axis)) for axis in zip(*numbers, strict=True)]
        assert sorted(numbers) == [list(each) for each in itertools.product(*axes)], name
        table.append({"name": name, "numbers": [_ranges(axis) for axis in axes], "shape": list(shape)})
    return table


def shapes_of(table: list[dict[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Return the parameters of a table."""
    shapes: dict[str, tuple[int, ...]] = {}
    for line in table:
        for numbers in itertools.product(*map(_numbers, line["numbers"])):
            shapes[line["name"].replace("*", "{}").format(*numbers)] = tuple(line["shape"])
    return shapes


def recorded(model: str, kind: Literal["published", "exported"]) -> dict[str, TensorSpec]:
    """Return the parameters of a model of `published_models`, as transformers saves them (without multi-token
    prediction) or as slime exports them."""
    shapes = shapes_of(json.loads(TABLES.read_bytes())[model][kind])
    return {name: TensorSpec(dtype="bfloat16", shape=shape) for name, shape in shapes.items()}


def _ranges(numbers: list[int]) -> list[list[int]]:
    """Return ascending numbers as ranges of first and last."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def _numbers(ranges: list[list[int]]) -> list[int]:
    return [number for first, last in ranges for number in range(first, last + 1)]
