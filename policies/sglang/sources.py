"""Checks of an installed SGLang before a server starts from it, read from its source without importing it.

Invariants:
- SGLang ignores fields of a request, and variables of its environment, that it does not know. So what headrace sends
  and the version lacks is refused by name.
- Loaders of weights that keep a tensor for the rest of one call are known by file: in all versions of `DIALECTS`, what
  they keep belongs to one module of a layer, which a push never divides (push/weights.py), or the loader fails aloud.
  Another one is a warning with the names of its models.
"""

from __future__ import annotations

import ast
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Final

from headrace.policies.errors import EngineSettingsInvalid
from headrace.policies.sglang.versions import DIALECTS

logger = logging.getLogger(__name__)

_OPTIONS: Final = "flush_cache abort_all_requests weight_version"
REQUESTS: Final[Mapping[str, str]] = {
    "/generate": "GenerateReqInput rid input_ids return_logprob extra_key sampling_params",
    "/abort_request": "AbortReq rid",
    "/pause_generation": "PauseGenerationReqInput mode",
    "/init_weights_update_group": "InitWeightsUpdateGroupReqInput master_address master_port rank_offset world_size "
    "group_name backend",
    "/destroy_weights_update_group": "DestroyWeightsUpdateGroupReqInput group_name",
    "/update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput names dtypes shapes group_name "
    f"load_format {_OPTIONS}",
    "/update_weights_from_disk": f"UpdateWeightFromDiskReqInput model_path {_OPTIONS}",
    "/update_weight_version": "UpdateWeightVersionReqInput new_version abort_all_requests",
    "/weights_checker": "CheckWeightsReqInput action",
}
"""By route: the class of its requests, and the fields that the client sends."""
VARIABLES: Final[Mapping[str, str]] = {
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "srt/environ.py",
    "SGLANG_TIMEOUT_KEEP_ALIVE": "srt/environ.py",
    "SGLANG_USE_CPU_ENGINE": "srt/platforms/__init__.py",
    "SGLANG_CPU_OMP_THREADS_BIND": "srt/utils/common.py",
}
"""Variables that servers get, and the file that reads each."""
KEEPING_LOADERS: Final = frozenset(
    f"{name}.py"
    for name in (
        *("bailing_moe_linear", "bailing_moe_v3", "deepseek_v4", "deepseek_common/deepseek_weight_loader"),
        *("dots3_common/modeling", "glm4_moe_lite", "glm5_next", "interns1pro", "kimi_k25_eagle3"),
        *("longcat_flash", "longcat_flash_nextn", "sarashina2_vision"),
    )
)
"""Loaders of SGLang's models that keep tensors, and have been read."""
_REQUESTS_FILE: Final = "srt/managers/io_struct.py"
_EMPTY: Final = re.compile(r"^ +(\w+)(?:: [^=\n]+)? = (?:\{\}|dict\(\)|defaultdict\()", re.MULTILINE)
_KEPT: Final = r"""\b{}\[[^\n]+\] = [^="'.]{{0,200}}(?<![-\w])(?:loaded_)?weight\b"""


@lru_cache(maxsize=4)
def check_sources(package: Path) -> None:
    """Raise EngineSettingsInvalid if the package directory `sglang` lacks what headrace sends; warn of new loaders that
    keep tensors."""
    known = ", ".join(dialect.version for dialect in DIALECTS)
    try:
        fields = _fields(ast.parse((package / _REQUESTS_FILE).read_bytes()))
        lacking = [
            f"{kind}.{name} ({route})"
            for route, (kind, *names) in ((route, text.split()) for route, text in REQUESTS.items())
            for name in names
            if name not in fields.get(kind, ())
        ]
        lacking += [name for name, file in VARIABLES.items() if name not in (package / file).read_text("utf-8")]
    except (OSError, SyntaxError, UnicodeDecodeError) as error:
        raise EngineSettingsInvalid(f"{package} cannot be read: {error}; install SGLang again") from error
    if lacking:
        raise EngineSettingsInvalid(
            f"{package} would ignore what headrace sends: {', '.join(lacking)}; set engines.sglang.python to an "
            f"environment with a version that headrace is written for ({known})"
        )
    for file, models in keeping_loaders(package / "srt" / "models").items():
        if file not in KEEPING_LOADERS:
            logger.warning(
                "%s: the loader %s of %s keeps tensors for the rest of a call, and is not one that headrace knows: if "
                "it joins tensors of different modules, pushes by group leave old weights; use push.transport = "
                '"disk"',
                package,
                file,
                ", ".join(models) or "no model of its own",
            )


def keeping_loaders(models: Path) -> dict[str, list[str]]:
    """Return the files of SGLang's models whose loaders keep tensors for the rest of a call, with their models: a
    dictionary that is empty at first gets a weight."""
    found: dict[str, list[str]] = {}
    for path in sorted(models.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(re.search(_KEPT.format(name), text) for name in _EMPTY.findall(text) if "load_weights" in text):
            _, _, entries = text.partition("\nEntryClass = ")
            found[str(path.relative_to(models))] = re.findall(r"\w+", entries)
    return found


def _fields(tree: ast.Module) -> dict[str, set[str]]:
    """Return the annotated fields of a module's classes, with those of their bases in it."""
    fields: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            own = {ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign)}
            fields[node.name] = own.union(*(fields.get(base, set()) for base in map(ast.unparse, node.bases)))
    return fields
