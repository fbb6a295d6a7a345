"""Configuration of a sandbox pool."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from headrace.sandboxes.pool.admission import AdmissionConfig, AdmissionSection
from headrace.sandboxes.retry import RetryConfig


class PoolSection(AdmissionSection):
    """Keys of a recipe's `[sandbox.pool]`."""

    create_timeout_s: float = Field(default=60.0, gt=0)
    """Time limit of one attempt to create a sandbox; a sandbox that starts later is found and killed."""
    warm: dict[str, int] = Field(default_factory=dict)
    """Number of sandboxes to boot in advance, by image, e.g. `{ host = 4 }`; for specs that request only an image."""

    @model_validator(mode="after")
    def _warm_leaves_room(self) -> Self:
        wanted, room = sum(self.warm.values()), self.max_live - self.evaluation_reserve
        if wanted >= room or min(self.warm.values(), default=0) < 0:
            raise ValueError(
                f"warm={self.warm}: the counts must not be negative and their sum must be below {room} (max_live - "
                "evaluation_reserve), because warm sandboxes take places too"
            )
        return self


class PoolConfig(PoolSection, AdmissionConfig, RetryConfig):
    """Limits, rates, retries, timeouts and warm sandboxes of a pool."""

    answer_timeout_s: float = Field(default=15.0, gt=0)
    """Time after which a kill, a renewal or a listing counts as failed."""
    teardown_concurrency: int = Field(default=16, ge=1)
    """Concurrent kills on one host; boots do not count towards this limit."""
    reconcile_every_s: float = Field(default=2.0, gt=0)
    """Interval at which the provider is asked for its sandboxes while a lease is waiting or a create is in doubt."""
    sweep_every_s: float = Field(default=30.0, gt=0)
    """Interval at which the provider is asked for its sandboxes at all other times."""
    warm_check_s: float = Field(default=5.0, gt=0)
    """A warm sandbox that does not run `true` within this time is replaced instead of being handed out."""
    warm_ttl_s: float = Field(default=120.0, gt=0)
    """Lease of a warm sandbox; the pool renews it."""
