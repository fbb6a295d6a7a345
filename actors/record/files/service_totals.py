"""Calls to a service and what they took, as workers count them and the metrics record them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTotals:
    """Calls to one service, and what they took."""

    calls: int = 0
    """Calls that have ended, failed ones included; cancelled calls are not counted."""
    failures: int = 0
    """Calls that failed, each of which ended its rollout as infra."""
    retries: int = 0
    """Requests beyond the first one of their call."""
    waiting_s: float = 0.0
    """Seconds that calls waited for a slot."""
    calling_s: float = 0.0
    """Seconds from getting a slot to the end of the call."""
    prompt_tokens: int = 0
    """Prompt tokens, as counted by the service."""
    completion_tokens: int = 0
    """Completion tokens, as counted by the service."""
    cost: float = 0.0
    """Cost by `services.NAME.price`."""

    def __add__(self, other: ServiceTotals) -> ServiceTotals:
        return ServiceTotals(**{key: getattr(self, key) + getattr(other, key) for key in _KEYS})

    def __sub__(self, other: ServiceTotals) -> ServiceTotals:
        return ServiceTotals(**{key: getattr(self, key) - getattr(other, key) for key in _KEYS})

    def line(self) -> str:
        """Return the totals as text, such as `40 calls, 1 failed, 3 retries, 0.2 s a call, 0.01 s waiting`."""
        calls = max(1, self.calls)
        parts = [f"{self.calls} calls, {self.failures} failed, {self.retries} retries"]
        parts.append(f"{self.calling_s / calls:.3g} s a call, {self.waiting_s / calls:.3g} s waiting")
        if self.prompt_tokens or self.completion_tokens:
            parts.append(f"{self.prompt_tokens} prompt and {self.completion_tokens} completion tokens")
        return ", ".join([*parts, f"cost {self.cost:.4g}"] if self.cost else parts)


_KEYS: Final = tuple(item.name for item in fields(ServiceTotals))


def service_totals(metrics: Iterable[Mapping[str, Any]]) -> dict[str, ServiceTotals]:
    """Return the totals by service over all records of kind `services`; records of other kinds are ignored."""
    totals: dict[str, ServiceTotals] = {}
    for record in metrics:
        for name, entry in record["services"].items() if record["kind"] == "services" else ():
            known = {key: entry[key] for key in _KEYS if key in entry}
            totals[name] = totals.get(name, ServiceTotals()) + ServiceTotals(**known)
    return dict(sorted(totals.items()))
