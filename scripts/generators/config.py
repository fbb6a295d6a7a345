"""The pages docs/configuration.md and docs/simulation_keys.md from the config models: every key, its default and its
docstring.

Invariant: a key that several tables share has one row, in the first of them; the others name that table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, TypeAlias, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from generators.docstrings import docstrings
from headrace.actors.derivation import clocks
from headrace.actors.derivation.rules import DERIVED
from headrace.actors.run.config import RunConfig

DOCS = Path(__file__).resolve().parents[2] / "docs"
PATH, SIMULATED_PATH = DOCS / "configuration.md", DOCS / "simulation_keys.md"
UNSET = "unset"
SET_BY_THE_RUN = {
    "learner": {"model_dir", "checkpoint_dir", "snapshot_dir", "seed"},
    "learner.simulated": {"checkpoint_dir", "seed", "weights"},
}
RULES = {key: text for key, (_, text) in (*DERIVED.items(), *clocks.DERIVED.items())}
FIRST: Mapping[str, str] = {
    "model": "path",
    "tasks": "train heldout",
    "agent": "kind settings",
    "agent.loop": "parser max_turns system observation",
    "agent.program": "prompt user max_turns",
    "environment": "kind settings",
    "environment.shell": "max_output_bytes",
    "sampling": "temperature max_tokens_per_turn max_context_tokens train_cut",
    "rollout": "agent_timeout_s evaluate_timeout_s",
    "dispatcher": "slots_per_worker pacing",
    "sandbox": "provider",
    "sandbox.local": "memory_bytes layer_bytes",
    "sandbox.remote": "urls key_file",
    "sandbox.pool": "max_live",
    "buffer": "batch_size group_size max_staleness mode advantage rule",
    "training": "steps save_every",
    "learner": "kind objective eps_low eps_high kl_coef entropy_coef learning_rate token_budget dtype device ranks",
    "learner.slime": "nodes gpus_per_node tensor_parallel arguments",
    "engines": "backend device count placement attach key_file tensor_parallel max_running",
    "engines.sglang": "arguments",
    "push": "transport pause_mode host",
    "evaluation": "tasks samples every_steps",
    "evaluation.sampling": "temperature",
    "telemetry": "page otlp_endpoint",
    "service": "seed workers",
    "services.NAME": "kind url model key_file",
    "cluster": "address state storage rollout_units",
}
"""Keys that most users set, by table."""
HEAD = """# Configuration

A recipe is a TOML file (`scripts/recipes/*.toml`). `--set table.key=value` overrides a key. Unknown keys, wrong types
and impossible combinations are refused at startup. Defaults are TOML; an *unset* key has none, and its meaning says
what follows. The keys of simulated agents, engines, learners and sandboxes are on a [page of their
own](simulation_keys.md). `scripts/generate config` writes both pages from the models in the code.

Keys whose default is *derived* follow from the model's `config.json`, the machine, the agent and other keys. The start
of a run and `--dry-run` print each with its reason, `sampling.max_context_tokens 8,192: the model's 40,960, bound by 25
GB of memory`, and the run's `config.json` has the value. A value is derived where the run's configuration is made: on
this host, or on a cluster's control node, which must see the model; what other nodes have is what the recipe or the
machine file says (`engines.device`, `engines.count`, `engines.gpu_memory_bytes`, `learner.device`). The sources of the
rules are in `actors/derivation/rules.py`, and the estimates of memory in [scaling.md](scaling.md).

## The keys that you will set

| key | default | meaning |
|---|---|---|
"""
ALL = """
# All keys

The headings are the tables of a recipe.
"""
SIMULATED_HEAD = """# Keys of simulations

Keys of a recipe whose agent, engines, learner or sandboxes are simulated: they take time and fail as configured, and
compute nothing ([simulate.md](simulate.md)). All other keys are in [configuration.md](configuration.md).
"""


Shown: TypeAlias = dict[type[BaseModel], tuple[str, type[BaseModel]]]
"""Path and model of the table that describes the keys of a class."""


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a table."""

    table: str
    name: str
    default: str
    """Cell of the default: TOML in a code span, or `unset`, `required` or the rule that derives it."""
    meaning: str


@dataclass(slots=True)
class Table:
    """One table of a recipe, and the table that describes the keys that it shares."""

    path: str
    """Path as in TOML's headings; with brackets for an array of tables."""
    keys: list[Key] = field(default_factory=list)
    shares: str = ""


def tables() -> list[Table]:
    """Return all tables in order."""
    shown: Shown = {}
    return list(_tables("", RunConfig, shown))


def _tables(path: str, model: type[BaseModel], shown: Shown) -> Iterator[Table]:
    texts, table, nested = docstrings(model), Table(path), []
    shared = next((base for base in model.__mro__ if base in shown), None)
    for name, info in model.model_fields.items():
        below = f"{path}.{name}".removeprefix(".")
        if name in SET_BY_THE_RUN.get(path, ()):
            continue
        if (inner := _inner(info.annotation)) is not None:
            kind, form = inner
            nested.append((form.format(below), kind))
            continue
        default = _default(below, info)
        if shared is not None and name in shared.model_fields:
            table.shares, first = shown[shared]
            if default == _default("", first.model_fields[name]):
                continue
        table.keys.append(Key(path, name, default, _meaning(texts.get(name, ""))))
    if table.keys or table.shares:
        for base in model.__mro__:
            if issubclass(base, BaseModel) and base.model_fields:
                shown.setdefault(base, (path, model))
        yield table
    for sub, kind in nested:
        yield from _tables(sub, kind, shown)


def _inner(annotation: Any) -> tuple[type[BaseModel], str] | None:
    """Return the model of the tables below a field, and the form of their path; None for a plain key."""
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        kind, form = arguments[1], "{}.NAME"
    elif get_origin(annotation) is tuple and arguments:
        kind, form = arguments[0], "[{}]"
    else:
        kinds = [kind for kind in (annotation, *arguments) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        kind, form = (kinds[0] if kinds else None), "{}"
    return (kind, form) if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _default(path: str, info: FieldInfo) -> str:
    if (rule := RULES.get(path)) is not None:
        return _cell(f"derived: {rule}")
    if info.is_required() or path == "model.path":
        return "required"
    value = info.get_default(call_default_factory=True)
    return UNSET if value is None else _cell(f"`{toml(value)}`")


def toml(value: Any) -> str:
    """Return a value as TOML, the same in every process."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{name} = {toml(item)}" for name, item in value.items())
        return f"{{ {pairs} }}" if pairs else "{}"
    if isinstance(value, frozenset):
        value = sorted(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(toml(item) for item in value)}]"
    return json.dumps(str(value), ensure_ascii=False)


def _meaning(text: str) -> str:
    """Return a docstring as a cell: TOML has no None, its keys are unset."""
    text = re.sub(r"(^|[.:] )None\b", r"\1Unset", text)
    return _cell(re.sub(r"\bNone\b", UNSET, text))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(path: str) -> str:
    """Return the anchor of a table's heading, as GitHub makes it."""
    return path.strip("[]").replace(".", "").lower()


def _lines(table: Table) -> list[str]:
    lines = ["", f"## [{table.path}]", ""]
    if table.shares:
        link = f"[{table.shares.strip('[]')}](#{_anchor(table.shares)})"
        but = ", but with these defaults and further keys" if table.keys else ""
        lines += [f"The keys of {link}{but}.", ""][: 2 if table.keys else 1]
    if table.keys:
        lines += ["| key | default | meaning |", "|---|---|---|"]
    return [*lines, *(f"| `{key.name}` | {key.default} | {key.meaning} |" for key in table.keys)]


def first_keys(found: list[Table]) -> list[Key]:
    """Return the keys of `FIRST`."""
    by_name = {(key.table, key.name): key for table in found for key in table.keys}
    return [by_name[table, name] for table, names in FIRST.items() for name in names.split()]


def render() -> dict[Path, str]:
    """Return the pages by their paths."""
    found = tables()
    parts: dict[bool, list[str]] = {False: [], True: []}
    for table in found:
        parts["simulated" in table.path] += _lines(table)
    first = [
        f"| [`{key.table}.{key.name}`](#{_anchor(key.table)}) | {key.default} "
        f"| {key.meaning.split('. ')[0].rstrip('.')}. |"
        for key in first_keys(found)
    ]
    return {
        PATH: HEAD + "\n".join(first) + "\n" + ALL + "\n".join(parts[False]) + "\n",
        SIMULATED_PATH: SIMULATED_HEAD + "\n".join(parts[True]) + "\n",
    }
