"""What a recipe may name, by the role of the key that submits it.

Invariants:
- Without the role `code`, a recipe names registered parts, files below listed folders, listed flags, and secrets of its
  owner. Every other file is refused, also in a key that this module does not know.
- A recipe is checked before anything that it names is imported, opened or looked up on a disk, and again when its paths
  are absolute. The functions that its tasks name are checked when their files have been read, and before one is
  imported.
- Nothing outside of the listed folders is reached by a link inside. (Who may write there can still exchange files
  between a check and their reading.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson
from pydantic import BaseModel

from headrace.actors.agents.loop.judge import RULES
from headrace.actors.agents.registry.registry import AGENTS
from headrace.actors.cluster.runs.quotas import Quota, Quotas
from headrace.actors.cluster.runs.records import Caller
from headrace.actors.cluster.runs.table import NAME
from headrace.actors.environments.registry import ENVIRONMENTS
from headrace.actors.errors import ConfigError, RoleTooSmall
from headrace.actors.evaluation.graders.plugins import EVALUATORS
from headrace.actors.run.config import SECRET, RunConfig, named_values
from headrace.actors.run.sources import KEY
from headrace.actors.runtime.pools.providers import PROVIDERS
from headrace.actors.services.registry import SERVICES
from headrace.buffer.primitives.registry import Registry
from headrace.buffer.tasks.evaluators import FunctionEvaluator, PluginEvaluator
from headrace.buffer.tasks.task import Task
from headrace.policies.learners.objectives.registry import OBJECTIVES
from headrace.policies.miniatures import names as miniatures

PARTS: Final[Mapping[str, Registry[Any]]] = {
    "agent.kind": AGENTS,
    "agent.loop.judge.rule": RULES,
    "environment.kind": ENVIRONMENTS,
    "sandbox.provider": PROVIDERS,
    "learner.objective": OBJECTIVES,
    "services.*.kind": SERVICES,
}
"""Keys with the name of a part, which an import path can be."""
FOLDERS: Final = frozenset(
    {
        *("model.path", "tasks.train", "tasks.heldout", "tasks.sources.*.train", "tasks.sources.*.heldout"),
        *("environment.retail.data", "environment.retail.policy", "environment.retail.tools"),
    }
)
"""Keys with a file or folder that is read as data."""
SECRETS: Final = (
    ("services", "*", "key_file"),
    ("engines", "key_file"),
    ("sandbox", "remote", "key_file"),
    ("sandbox", "e2b", "api_key_file"),
    ("telemetry", "page_key_file"),
)
"""Keys with a private file."""
FLAGS: Final = frozenset({"engines.sglang.arguments", "learner.slime.arguments"})
"""Keys with arguments of programs that run as Ray's user."""
URLS: Final = frozenset({"telemetry.otlp_endpoint", "sandbox.e2b.api_url", "sandbox.e2b.sandbox_url"})
"""Keys with an address to which credentials in the environment of the nodes are sent, such as E2B_API_KEY."""
CODE: Final = frozenset({"learner.slime.environment", "engines.sglang.environment"})
"""Further keys that decide what runs as Ray's user. So does every file in a key that is not named above."""
_SECRET: Final = re.compile(SECRET + NAME.pattern)
_NUMBER: Final = re.compile(r"-\d+(\.\d+)?")
"""Value of a flag that begins with a dash."""
_OF_THE_RUN: Final = frozenset(
    {
        *("learner.model_dir", "learner.checkpoint_dir", "learner.snapshot_dir"),
        *("cluster.state", "cluster.storage"),
    }
)
"""Files that the recipe cannot choose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What a caller may let the recipes of an owner name."""

    owner: str
    caller: Caller
    quotas: Quotas

    @property
    def _grant(self) -> Quota:
        return self.quotas.of(self.owner)

    def check_recipe(self, config: RunConfig, *, as_written: bool = False) -> None:
        """Check what a recipe names. With `as_written`, its paths are not absolute yet and secrets have their names.
        Raises RoleTooSmall."""
        if self.caller.may_name_code:
            return
        sources = {f"{KEY}.{name}." if name else "": own for name, own in config.by_source().items()}
        for prefix, own in {"": config, **sources}.items():
            for key, pattern, value in _leaves(own):
                if value and (problem := self._problem(own, pattern, value, as_written)):
                    raise self._too_small(f"{prefix}{key}", value, problem)

    def check_tasks(self, tasks: Iterable[Task]) -> None:
        """Check which functions the evaluators of tasks name. Raises RoleTooSmall."""
        for task in tasks if not self.caller.may_name_code else ():
            for spec in task.evaluators:
                name = getattr(spec, spec.kind) if isinstance(spec, PluginEvaluator | FunctionEvaluator) else ""
                if problem := self._unregistered(EVALUATORS, name):
                    raise self._too_small(f"task {task.id}: evaluator.{spec.kind}", name, problem)

    def check_folder(self, key: str, folder: Path, *of_the_run: Path) -> None:
        """Check that a folder that a request names is listed, or below one of the run's. Raises RoleTooSmall."""
        if not self.caller.may_name_code and not _is_below(folder, (*of_the_run, *self._grant.folders)):
            problem = f"is not below a folder of the run or of `folders` ({_listed(self._grant.folders)})"
            raise self._too_small(key, folder, problem)

    def with_secrets(self, document: dict[str, Any]) -> dict[str, Any]:
        """Replace each `secret:NAME` in a recipe's document by the owner's file; return the document. Raises
        ConfigError."""
        for key, table, last in named_values(document, SECRETS):
            if not table[last].startswith(SECRET):
                continue
            if (file := (known := self._secrets()).get(table[last].removeprefix(SECRET))) is None:
                raise ConfigError(
                    f"{key} {table[last]!r}: {self.owner} has no such secret ({_listed(known)}); the operator adds it "
                    "to the folder `secrets` of the file of quotas"
                )
            table[last] = str(file)
        return document

    def _secrets(self) -> dict[str, Path]:
        """Return the owner's secrets by name. They may be links, as in a volume of Kubernetes, that lead elsewhere on
        another node, and are not resolved."""
        folder = None if self.quotas.secrets is None else self.quotas.secrets / self.owner
        files = folder.iterdir() if folder is not None and folder.is_dir() else ()
        return {file.name: file for file in files if file.is_file()}

    def _problem(self, config: RunConfig, pattern: str, value: Any, as_written: bool) -> str:
        """Return why a value needs the role `code`; empty if it does not."""
        grant = self._grant
        if pattern in PARTS:
            return self._unregistered(PARTS[pattern], str(value))
        if pattern in FOLDERS:
            path = Path(value)
            is_ours = as_written and str(path).startswith(miniatures.PREFIX) and ".." not in path.parts
            is_unset = pattern == "model.path" and path == Path()
            if is_ours or is_unset or _is_below(path, (miniatures.cache_folder(), *grant.folders)):
                # slime loads it with trust_remote_code.
                has_code = pattern == "model.path" and config.learner.kind == "slime" and _names_code(path)
                return "has `auto_map`, the name of code that slime runs" if has_code else ""
            return f"is not below a folder of `folders` ({_listed(grant.folders)})"
        if tuple(pattern.split(".")) in SECRETS:
            # Whether it exists is checked when it is replaced (`with_secrets`).
            if (as_written and _SECRET.fullmatch(str(value))) or value in self._secrets().values():
                return ""
            return "is a file; a secret is named as secret:NAME"
        if pattern in FLAGS:
            given = [word for word in value if word.startswith("-") and not _NUMBER.fullmatch(word)]
            if unlisted := [flag for flag in (*given, *value[:1]) if flag.partition("=")[0] not in grant.flags]:
                return f"has {unlisted[0]}, which is not in `flags` ({_listed(grant.flags)})"
            return ""
        if pattern in URLS:
            if pattern.startswith("sandbox.e2b.") and config.sandbox.e2b.api_key_file:
                return ""
            if any(value == url or value.startswith(f"{url.rstrip('/')}/") for url in grant.urls):
                return ""
            return f"would be sent credentials of the nodes, and is not in `urls` ({_listed(grant.urls)})"
        if pattern in CODE or (isinstance(value, Path) and pattern not in _OF_THE_RUN):
            return "decides what runs, or is read, as Ray's user"
        return ""

    def _unregistered(self, registry: Registry[Any], name: str) -> str:
        parts = self._grant.parts
        if ":" not in name or name in parts:
            return ""
        return f"is an import path and not in `parts`; registered are {_listed((*registry.names(), *parts))}"

    def _too_small(self, key: str, value: object, problem: str) -> RoleTooSmall:
        text = f"{key} {str(value)[:200]!r} {problem}"
        return RoleTooSmall(f"{text}: the role code is needed, and this is {self.caller} of {self.caller.owner}")


def _leaves(value: object, key: str = "", pattern: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield each key of a configuration with its value: dotted, and with `*` for the names of tables."""
    if isinstance(value, BaseModel):
        for name, below in value:
            yield from _leaves(below, f"{key}.{name}" if key else name, f"{pattern}.{name}" if pattern else name)
        return
    tables = value if isinstance(value, Mapping) else dict(enumerate(value)) if isinstance(value, tuple) else {}
    if tables and all(isinstance(below, BaseModel) for below in tables.values()):
        for place, below in tables.items():
            yield from _leaves(below, f"{key}.{place}", f"{pattern}.*")
    else:
        yield key, pattern, value


def _is_below(path: Path, folders: Iterable[Path]) -> bool:
    """Return True if a path is below one of the folders, both as written and where links lead, also those in it. A path
    that is not below one as written is not looked up."""
    places = [(folder, folder.resolve()) for folder in folders]
    if ".." in path.parts or not any(path.is_relative_to(name) for names in places for name in names):
        return False
    links = (below for below in path.rglob("*") if below.is_symlink())
    return all(any(one.resolve().is_relative_to(place) for _, place in places) for one in (path, *links))


def _names_code(model: Path) -> bool:
    """Return True if a configuration of a model names code (`auto_map` of transformers), or cannot be read."""
    try:
        documents = [orjson.loads(path.read_bytes()) for path in model.glob("*config.json")]
    except (OSError, ValueError):
        return True
    return any(isinstance(document, dict) and "auto_map" in document for document in documents)


def _listed(names: Iterable[object]) -> str:
    return ", ".join(map(str, names)) or "none"
