"""Operations on the runs of a cluster: what a method of the actor is over HTTP.

Invariants:
- An operation is declared once, at its method in `contract.RunsApi`. Its route, the check of what a request contains,
  the clients' calls and the decoding of answers follow from the declaration and the method's annotations.
- A method has the parameters `self` and `caller`, then what a client sends: what the path names (`run_id` for `{run}`),
  `idempotency_key` in the header of that name, and the rest in the query of GET and DELETE or in the body.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, create_model

from headrace.actors.cluster.runs.records import ApiRole

F = TypeVar("F", bound=Callable[..., Any])

IDEMPOTENCY_KEY: Final = "idempotency_key"
_WAITS: Final = ("timeout_s", "deadline_s")
"""Arguments with a time for which an answer may be waited for."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation. An answer has its result, below `key` if there is one. A request that is lost is repeated if the
    operation is `repeatable`. An answer may take `answer_s` seconds longer than others. With a `body`, that is the last
    argument as a whole."""

    function: Callable[..., Any]
    method: str
    path: str
    role: ApiRole
    key: str = ""
    status: int = 200
    repeatable: bool = True
    answer_s: float = 0.0
    body: type[BaseModel] | None = None

    @property
    def name(self) -> str:
        return self.function.__name__

    @property
    def has_query(self) -> bool:
        """True if the arguments are in the query, not in a body."""
        return self.method in ("GET", "DELETE")

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """What a client sends, by name."""
        return dict([*inspect.signature(self.function).parameters.items()][2:])

    @cached_property
    def in_path(self) -> Mapping[str, str]:
        """The parameters in the path, with their names there."""
        places = {name: name.removesuffix("_id") for name in self.parameters}
        return {name: place for name, place in places.items() if f"{{{place}}}" in self.path}

    @cached_property
    def request(self) -> type[BaseModel]:
        """Model of the query or the body. Unknown names are refused."""
        if self.body is not None:
            return self.body
        hints = get_type_hints(self.function, include_extras=True)
        fields: dict[str, Any] = {
            name: (hints[name], ... if parameter.default is parameter.empty else parameter.default)
            for name, parameter in self.parameters.items()
            if name not in self.in_path and name != IDEMPOTENCY_KEY
        }
        config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
        return create_model(self.name, __config__=config, **fields)

    @cached_property
    def result(self) -> TypeAdapter[Any]:
        """Decoder of the result. Unknown keys of records are ignored: a newer server may have more."""
        return TypeAdapter(get_type_hints(self.function, include_extras=True)["return"])

    def arguments(self, request: BaseModel) -> dict[str, Any]:
        """Return the arguments in a query or body."""
        return dict(request) if self.body is None else {[*self.parameters][-1]: request}

    def bound(self, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Return the arguments of a call by name, with defaults. Raises TypeError."""
        bound = inspect.signature(self.function).bind(None, None, *arguments, **named)
        bound.apply_defaults()
        return dict([*bound.arguments.items()][2:])

    def wait_s(self, arguments: Mapping[str, Any]) -> float:
        """Return the seconds that an answer may take beyond the usual time limit."""
        return self.answer_s + sum(float(arguments.get(name, 0.0)) for name in _WAITS)


def operation(method: str, path: str, role: ApiRole, **options: Any) -> Callable[[F], F]:
    """Declare an operation at its method; see `Operation` for the options."""

    def declared(function: F) -> F:
        made = Operation(function=function, method=method, path=path, role=role, **options)
        vars(function).setdefault("operations", []).insert(0, made)
        return function

    return declared


def operation_of(function: Callable[..., Any]) -> Operation:
    """Return the operation that a method is."""
    [made, *_] = vars(function)["operations"]
    assert isinstance(made, Operation)
    return made


def operations_of(contract: type[object]) -> list[Operation]:
    """Return all operations of a contract."""
    return [made for member in vars(contract).values() for made in getattr(member, "operations", ())]
