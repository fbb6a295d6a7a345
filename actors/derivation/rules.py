"""Values that follow from the model, the machine and the agent: one rule for each key that a recipe leaves unset.

Invariants:
- A key that the recipe, a machine file or `--set` sets is never touched. A rule sees what is set and what the rules
  before it gave, so the order of `DERIVED` matters.
- Values are derived where the run's configuration is made (on a cluster, by its control node) and written to the run's
  config.json, so a resume derives nothing.
- A model that is not on this host bounds nothing; the check of its files refuses the run later.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

from pydantic import BaseModel, ValidationError

from headrace.actors.derivation import clocks
from headrace.actors.derivation.host import MOST_SANDBOXES, Host, gigabytes, this_host
from headrace.actors.derivation.terms import USED_RAM, Terms
from headrace.actors.environments.config import WITHOUT_SANDBOX
from headrace.buffer.primitives.sections import overlaid
from headrace.policies.errors import ModelInvalid
from headrace.policies.miniatures.names import name_of
from headrace.policies.models import tiny
from headrace.policies.models.facts import ModelFacts

_SMALL, _LARGE = 10_000_000, 300_000_000
"""Parameters up to which a model is a miniature, which a CPU trains faster than a GPU does, and from which on it is of
the sizes that publications train."""
_CONTEXTS: Final = {True: 98_304, False: 32_768}
"""Most tokens of a context that programs and other agents need: slime's coding agents have 96,000; swe-rl, Echo and
Endless Terminals 16,384 to 32,768."""
_ON_CPU: Final = {True: 32_768, False: 4096}
"""The same on a CPU, which samples some hundred tokens a second; the prompts of programs alone have over 10,000."""
_UNKNOWN_CONTEXT: Final = 4096
_MICRO_BATCH: Final = 16_384
_LOOPS: Final = ("loop", "shell", "immediate", "simulated")
"""Agents that are neither programs nor of other packages."""
_OF_SOURCES: Final = ("agent", "environment", "sampling", "rollout")
"""Tables of a source whose values may follow from its own agent and limits."""

LONGEST_OF_SOURCES: Final = frozenset({"training.stage_timeout_s", "service.stall_s"})
"""Timeouts of a run that must be long enough for each source."""

Rule: TypeAlias = Callable[[Terms], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Value that a rule gave to a key, and why."""

    key: str
    value: Any
    reason: str

    @property
    def line(self) -> str:
        """The line that the start of a run prints."""
        value = f"{self.value:,}" if type(self.value) is int else self.value
        return f"{self.key} {value}: {self.reason}"


def _program(t: Terms) -> bool:
    # An agent of another package runs its own loop too.
    return str(t["agent.kind"]) not in _LOOPS


def _class(t: Terms) -> bool:
    return ":" in str(t["agent.kind"])


def _real(rule: Rule) -> Rule:
    return lambda t: None if t["engines.backend"] == "simulated" else rule(t)


def _megatron(rule: Rule) -> Rule:
    return lambda t: rule(t) if t.trains_here else None


def _of(agent: str, rule: Rule, environment: str = "") -> Rule:
    return lambda t: rule(t) if t["agent.kind"] == agent and environment in ("", t["environment.kind"]) else None


def _learner_device(t: Terms) -> str:
    if t.size <= _SMALL:
        return "cpu"
    serving = t["engines.tensor_parallel"] * (t["engines.count"] if t.is_set("engines.count") else 1)
    claimed = serving if t.is_set("engines.device") and t["engines.device"] == "cuda" else 0
    return "cuda" if len(t.host.gpus) >= claimed + t["learner.ranks"] else "cpu"


def _backend(t: Terms) -> str:
    if t.is_set("engines.device"):
        return "sglang" if t["engines.device"] == "cuda" else "cpu"
    return "sglang" if t.size > _SMALL and t.free_gpus >= t["engines.tensor_parallel"] else "cpu"


def _engine_count(t: Terms) -> tuple[int, str]:
    if t["engines.device"] == "cuda":
        return max(1, t.free_gpus // t["engines.tensor_parallel"]), "the GPUs that the learner leaves"
    t.set("engines.count", 1)
    one = t.on_cpu()
    most, memory = max(2, t.host.cores // 4), t.host.memory_bytes
    fit = int((0.8 * USED_RAM * memory - t.size * one["learner"]) // max(1, t.size * one["engines"]))
    if most <= fit:
        return most, "one for each four cores, at least two so that one serves during a push"
    return max(1, fit), f"as many as {t.host_memory} hold beside the learner"


def _context(t: Terms) -> tuple[int, str]:
    on_cpu, model = t["engines.device"] == "cpu", t.model
    need = _ON_CPU[_program(t) and not _class(t)] if on_cpu else _CONTEXTS[_program(t)]
    if model is None:
        return t["sampling.most_context_tokens"] or _UNKNOWN_CONTEXT, "the model is not on this host"
    (tokens, memory), (cache, of_engines) = t.micro_batch(), t.cache()
    # An engine that holds one context could serve no second agent. `memory_problem` refuses what is below the least.
    on = " on a CPU" if on_cpu else ""
    most: int | None = t["sampling.most_context_tokens"]
    bounds: list[tuple[float, str]] = [
        (most, f"at most the published {most:,}") if most else (need, f"at most {need:,} for {t['agent.kind']}{on}")
    ]
    bounds += [(max(1024, tokens), f"bound by {memory}"), (max(1024, cache / 2), f"bound by {of_engines}")]
    keys = ("learner.token_budget", "engines.max_context_tokens")
    bounds += [(t[key], f"bound by {key}") for key in keys if t.is_set(key) and t[key] is not None]
    bound, reason = min(bounds)
    if model.context <= bound:
        return model.context, f"the model's {model.context:,}"
    if bound == most:
        return most, f"the model's {model.context:,}, {reason}"
    step = 32_768 if bound >= 32_768 else 1 << int(math.log2(bound))
    return int(bound // step * step), f"the model's {model.context:,}, {reason}"


def _running(t: Terms) -> tuple[int, str] | None:
    if t["engines.backend"] != "cpu":
        return None
    context = t["sampling.max_context_tokens"]
    count = max(1, int(min(64, t.cache()[0] / context)))
    held = f", {count * context * t.model.cache_values * 4 / 1e9:.1f} GB an engine" if t.model else ""
    return count, f"{'the most for one' if count == 64 else 'the contexts that fit in memory'}{held}"


def _turns(tokens: int, least: int, most: int) -> Rule:
    return lambda t: max(least, min(most, t["sampling.max_context_tokens"] // tokens))


_few_turns, _many_turns = _turns(1024, 4, 16), _turns(512, 16, 200)


def _output(t: Terms) -> int:
    return max(48, int(t["sampling.max_context_tokens"]) // 4)


def _rate(t: Terms) -> tuple[float, str] | None:
    if t["learner.kind"] not in ("megatron", "slime") or t.model is None:
        return None
    share = math.log(t.size / _SMALL) / math.log(_LARGE / _SMALL)
    rate = float(f"{3e-4 * (1e-6 / 3e-4) ** max(0.0, min(1.0, share)):.0e}")
    size = f"{t.size / 1e9:.1f}B" if t.size >= 1e9 else f"{t.size / 1e6:.1f}M"
    return rate, f"{size} parameters; 3e-4 up to 10M as measured, 1e-6 from 300M on as published"


def _batch(t: Terms) -> int:
    group, ranks = t["buffer.group_size"], t["learner.ranks"]
    if t["learner.kind"] == "slime":
        ranks = t["learner.slime.nodes"] * t["learner.slime.gpus_per_node"]
    return int(max(8, -(-ranks // group)) * group)


def _budget(t: Terms) -> int:
    context = max(t["sampling.max_context_tokens"], t.longest)
    return int(_MICRO_BATCH if t.micro_batch()[0] >= _MICRO_BATCH > context else context)


def unused(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the beginnings of keys that no rollout of a document, which may be invalid, has a use for: those of
    sandboxes if no task boots one, and of programs if no agent is one. Nothing is imported."""
    tasks = document.get("tasks")
    sources = tasks.get("sources") if isinstance(tasks, dict) else None
    listed = [source for source in sources if isinstance(source, dict)] if isinstance(sources, list | tuple) else []
    own = [overlaid(document, source) for source in listed or [{}]]
    tables = [(each.get("agent"), each.get("environment")) for each in own]
    kinds = [[table.get("kind") if isinstance(table, dict) else None for table in pair] for pair in tables]
    boots = any(agent != "loop" or environment not in WITHOUT_SANDBOX for agent, environment in kinds)
    programs = any(agent is not None and ":" not in str(agent) and agent not in _LOOPS for agent, _ in kinds)
    return (*(() if boots else ("sandbox.",)), *(() if programs else ("agent.program.",)))


def _provider(t: Terms) -> tuple[str, str] | None:
    if "sandbox." in unused(t.document):
        return "simulated", "no task boots a sandbox"
    return None if t["cluster.address"] == "local" else ("remote", "all nodes of a cluster reach it")


def _max_live(t: Terms) -> tuple[int, str]:
    if "sandbox." in unused(t.document):
        return MOST_SANDBOXES, "no task boots a sandbox"
    if t["sandbox.provider"] != "local":
        return 64, "as many as `headrace serve sandbox` has by default"
    fit, reason = t.host.sandboxes(t.size * sum(t.on_cpu().values()), t["sandbox.local.memory_bytes"])
    return max(fit, t["sandbox.pool.evaluation_reserve"] + 2), reason


def _evaluation_slots(t: Terms) -> int:
    room, key = t["sandbox.pool.max_live"] - t["sandbox.pool.evaluation_reserve"], "dispatcher.slots_per_worker"
    taken = t[key] * t["service.workers"] if t.is_set(key) else 0
    return int(max(1, min(room * 2 // 5, room - taken)))


def _slots(t: Terms) -> int:
    free = t["sandbox.pool.max_live"] - t["sandbox.pool.evaluation_reserve"] - t["dispatcher.evaluation_slots"]
    ahead = (1 + t["buffer.max_staleness"]) * t["buffer.batch_size"]
    served = 4 * t["engines.count"] * t["engines.max_running"] if t["engines.count"] else free
    return int(max(1, min(free, ahead, served) // t["service.workers"]))


_SHORT: Final = "one for each 1,024 tokens of context, 4 to 16 (Echo and Endless Terminals: 16)"
_LONG: Final = "one for each 512 tokens of context, 16 to 200"
_QUARTER: Final = "a quarter of the context, were each byte a token"
DERIVED: Final[Mapping[str, tuple[Rule, str]]] = {
    "learner.device": (_megatron(_learner_device), "`cuda` from 10M parameters on if a GPU is free, else `cpu`"),
    "learner.dtype": (
        _megatron(lambda t: "bfloat16" if t["learner.device"] == "cuda" else "float32"),
        "`bfloat16` on a GPU, `float32` on a CPU",
    ),
    "learner.recompute": (_megatron(lambda t: t.size > _SMALL), "true from 10M parameters on"),
    "engines.backend": (_backend, "`sglang` from 10M parameters on if the learner leaves a GPU, else `cpu`"),
    "engines.device": (
        _real(lambda t: "cuda" if t["engines.backend"] == "sglang" and t.free_gpus > 0 else "cpu"),
        "`cuda` for SGLang if the learner leaves a GPU, else `cpu`",
    ),
    "engines.count": (
        _real(_engine_count),
        "the GPUs that the learner leaves; on a CPU, one for each four cores, at least two, as memory allows",
    ),
    "sampling.max_context_tokens": (
        _real(_context),
        (
            "the model's, as far as memory allows; at most 98,304 for programs and classes (slime's coding agents), "
            "32,768 for others (swe-rl); with engines on a CPU at most 32,768 for programs, 4,096 for others"
        ),
    ),
    "sampling.max_tokens_per_turn": (
        _real(lambda t: max(16, t["sampling.max_context_tokens"] // 8)),
        "an eighth of the context, as in Echo and Endless Terminals",
    ),
    "engines.max_running": (_running, "64; of the embedded engine as many contexts as fit in memory"),
    "agent.loop.max_turns": (_of("loop", _few_turns), _SHORT),
    "agent.shell.max_turns": (_of("shell", _few_turns), _SHORT),
    "agent.program.max_turns": (
        lambda t: _many_turns(t) if _program(t) and not _class(t) else None,
        _LONG,
    ),
    "agent.turns": (lambda t: _many_turns(t) if _class(t) else None, _LONG),
    "agent.shell.max_observation_bytes": (_of("shell", _output), _QUARTER),
    "environment.shell.max_output_bytes": (_of("loop", _output, "shell"), _QUARTER),
    "environment.terminal.max_output_characters": (_of("loop", _output, "terminal"), _QUARTER),
    "rollout.agent_timeout_s": (
        lambda t: 1800.0 if _program(t) else 600.0,
        "1800 for programs and classes (slime's coding agents), 600 for other agents (Echo)",
    ),
    "learner.learning_rate": (
        _rate,
        "3e-4 up to 10M parameters (measured), 1e-6 from 300M on (nine published recipes), geometric between",
    ),
    "buffer.batch_size": (_batch, "8 groups (slime's coding agents), more for more ranks"),
    "learner.token_budget": (_real(_budget), "16384 (swe-rl) if that fits in memory, at least one context"),
    "sandbox.provider": (_provider, "`simulated` if no task boots a sandbox; else `local`, `remote` on a cluster"),
    "engines.placement": (
        _real(lambda t: None if t["cluster.address"] == "local" else "ray"),
        "`local`; `ray` on a cluster",
    ),
    "sandbox.pool.max_live": (_max_live, "what cores, memory and processes of this host allow; 64 for other providers"),
    "dispatcher.evaluation_slots": (_evaluation_slots, "two fifths of the sandboxes"),
    "dispatcher.slots_per_worker": (
        _slots,
        "the sandboxes that evaluations leave, at most what may be in flight, and four for each sequence of an engine",
    ),
}
"""Rule for each derived key, and the text that the guide 'Configuration' shows in place of a default. A rule returns
None where the key has no effect, and a reason beside the value where the text would not do."""


def derive(
    document: dict[str, Any], shape: type[BaseModel], *, reads: bool = True, host: Host | None = None
) -> tuple[Derived, ...]:
    """Fill in the keys that a document with absolute paths leaves unset, and return them. `shape` is the class of the
    configuration. Unless `reads`, the model is not looked at. Values of a wrong type are left for validation."""
    host, section, tasks = host or this_host(), document.get("model"), document.get("tasks")
    named = section.get("path") if isinstance(section, dict) else None
    sources = tasks.get("sources") if isinstance(tasks, dict) else None
    terms = Terms(document, shape, facts_of(Path(named)) if reads and isinstance(named, str) else None, host)
    own = []
    for source in sources if isinstance(sources, list | tuple) else ():
        if isinstance(source, dict):
            merged = overlaid(document, {table: source[table] for table in _OF_SOURCES if table in source})
            of_source = Terms(copy.deepcopy(merged), shape, terms.model, host)
            own.append((Terms(source, shape, None, host), _fill(of_source)))
            with suppress(ValidationError):
                terms.longest = max(terms.longest, of_source["sampling.max_context_tokens"])
    found = _fill(terms)
    given = {one.key: one.value for one in found}
    for key in LONGEST_OF_SOURCES & given.keys():
        terms.set(key, max(given[key], *(one.value for _, derived in own for one in derived if one.key == key), 0.0))
    for source_terms, derived in own:
        for one in derived:
            if one.key.partition(".")[0] in _OF_SOURCES and given.get(one.key) != one.value:
                source_terms.set(one.key, one.value)
    return found


def facts_of(model_dir: Path) -> ModelFacts | None:
    """Return the facts of a model; None if it is not here, or not one that `ModelFacts` reads."""
    if not model_dir.is_dir() and name_of(model_dir):
        # All miniatures have one architecture, and the check of the model's files builds this one.
        return ModelFacts.of(tiny.model_config())
    with suppress(ModelInvalid):
        return ModelFacts.read(model_dir)
    return None


def _fill(terms: Terms) -> tuple[Derived, ...]:
    found = []
    for key, (rule, text) in (*DERIVED.items(), *clocks.DERIVED.items()):
        if not terms.is_set(key):
            with suppress(ValidationError):
                given = rule(terms)
                value, reason = given if isinstance(given, tuple) else (given, text)
                if value is not None:
                    terms.set(key, value)
                    found.append(Derived(key=key, value=value, reason=reason))
    return tuple(found)


def memory_problem(terms: Terms) -> str | None:
    """Describe why a model is too large for the memory that its learner and engines have, with what fits; None if it is
    not, or not known."""
    held = {part: each for part, each in terms.on_cpu().items() if each}
    parts = " and ".join(f"{part} {each}" for part, each in held.items())
    used, size = USED_RAM * terms.host.memory_bytes, f"{terms.size / 1e9:.1f}B parameters"
    if (needed := terms.size * sum(held.values())) > used:
        return (
            f"model.path: bytes for each parameter are {parts}: {size} need {gigabytes(needed)} GB, this host has "
            f"{gigabytes(terms.host.memory_bytes)} GB, of which three quarters are for them: at most "
            f"{used / sum(held.values()) / 1e9:.2g}B; use learner.kind slime on GPUs, or a smaller model"
        )
    for tokens, memory in (terms.micro_batch(), terms.cache()):
        if tokens < 16:
            return (
                f"model.path: {size} do not fit in {memory}; use more GPUs for learner.slime or engines.tensor_parallel"
            )
    return None
