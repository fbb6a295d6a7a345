"""Engine of ours as slime's weight updaters call it, in a training process.

`engine.METHOD.remote(...)` begins a call and returns Ray's reference, as for slime's own engine actors. The engine
group answers, for the push that is running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.actors.runtime.actors.runtime import reference

if TYPE_CHECKING:
    from headrace.policies.engine import EngineId


@dataclass(frozen=True, slots=True)
class RolloutEngine:
    """Handle of one engine; `group` is the engine group's actor."""

    group: object
    engine_id: EngineId

    def __getattr__(self, method: str) -> EngineMethod:
        if method.startswith("_"):
            raise AttributeError(method)
        return EngineMethod(self, method)


@dataclass(frozen=True, slots=True)
class EngineMethod:
    """Method of an engine, as Ray has it."""

    engine: RolloutEngine
    name: str

    def remote(self, *positional: str, **asked: Any) -> Any:
        # slime gives one argument by its place, the name of a group. Torch's types stay here: the engine group does not
        # import torch.
        asked |= dict(zip(("group_name",), positional, strict=False))
        for name, convert in (("dtypes", str), ("shapes", tuple)):
            if name in asked:
                asked[name] = list(map(convert, asked[name]))
        return reference(self.engine.group, "rollout_engine", self.engine.engine_id, self.name, asked)
