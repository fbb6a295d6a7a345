"""The page docs/configuration.md from the config models: every key, its default and its docstring."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_origin

from pydantic import BaseModel

from generators.docstrings import docstrings
from headrace.actors.derivation import clocks
from headrace.actors.derivation.rules import DERIVED
from headrace.actors.run.config import RunConfig

PATH = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
SET_BY_THE_RUN = {
    "learner": {"model_dir", "checkpoint_dir", "snapshot_dir", "seed"},
    "learner.simulated": {"checkpoint_dir", "seed", "weights"},
}
RULES = {key: text for key, (_, text) in (*DERIVED.items(), *clocks.DERIVED.items())}
HEAD = """# Configuration

A recipe is a TOML file (`scripts/recipes/*.toml`); its tables are the headings below. `--set table.key=value` overrides
a key. Unknown keys, wrong types and impossible combinations are refused at startup. `scripts/generate config` writes
this page from the models in the code.

Keys whose default is *derived* follow from the model's `config.json`, the machine, the agent and other keys. The start
of a run and `--dry-run` print each with its reason, `sampling.max_context_tokens 8,192: the model's 40,960, bound by 25
GB of memory`, and the run's `config.json` has the value. A value is derived where the run's configuration is made: on
this host, or on a cluster's control node, which must see the model; what other nodes have is what the recipe or the
machine file says (`engines.device`, `engines.count`, `engines.gpu_memory_bytes`, `learner.device`). The sources of the
rules are in `actors/derivation/rules.py`, and the estimates of memory in [scaling.md](scaling.md).
"""


def section(path: str, model: type[BaseModel]) -> list[str]:
    """Return the heading, the table of plain keys, and the sections of nested models."""
    texts, lines, nested = docstrings(model), [], []
    for name, field in model.model_fields.items():
        if name in SET_BY_THE_RUN.get(path, set()):
            continue
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            nested.append((f"{path}.{name}" if path else name, field.annotation))
            continue
        if get_origin(field.annotation) is dict and issubclass(entry := get_args(field.annotation)[1], BaseModel):
            nested.append((f"{path}.{name}.NAME" if path else f"{name}.NAME", entry))
            continue
        entry = get_args(field.annotation)[0] if get_origin(field.annotation) is tuple else None
        if isinstance(entry, type) and issubclass(entry, BaseModel):
            nested.append((f"[{path}.{name}]", entry))
            continue
        default = "required" if field.is_required() else f"`{_shown(field.get_default(call_default_factory=True))}`"
        if (rule := RULES.get(f"{path}.{name}")) is not None:
            default = f"derived: {rule}"
        lines.append(f"| `{name}` | {default} | {texts.get(name, '')} |")
    table = [f"\n## [{path}]\n", "| key | default | meaning |", "|---|---|---|", *lines] if lines else []
    return table + [line for sub_path, sub in nested for line in section(sub_path, sub)]


def _shown(default: object) -> object:
    """Return a default as text that is the same in every process."""
    return sorted(str(item) for item in default) if isinstance(default, frozenset) else default


def render() -> dict[Path, str]:
    """Return the page by its path."""
    return {PATH: HEAD + "\n".join(section("", RunConfig)) + "\n"}
