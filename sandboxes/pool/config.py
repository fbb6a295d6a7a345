"""Settings of a sandbox pool."""

from __future__ import annotations

from pydantic import Field, model_validator

from headrace.sandboxes.pool.admission import AdmissionConfig
from headrace.sandboxes.retry import RetryConfig


class PoolConfig(AdmissionConfig, RetryConfig):
    """Places, rates, retries, clocks and warm sandboxes of a pool."""

    create_timeout_s: float = Field(default=60.0, gt=0)
    """One try of a boot that takes longer is given up; what comes to life later is found and killed."""
    answer_timeout_s: float = Field(default=15.0, gt=0)
    """How long a kill, a renewal or a listing may take before it counts as failed."""
    teardown_concurrency: int = Field(default=16, ge=1)
    """Kills at once on one host; boots never take these."""
    reconcile_every_s: float = Field(default=2.0, gt=0)
    """While a lease waits for a place, or a create is in doubt, how often the provider is asked what lives."""
    sweep_every_s: float = Field(default=30.0, gt=0)
    """How often otherwise."""
    warm: dict[str, int] = Field(default_factory=dict)
    """Sandboxes kept ready by image, e.g. `{ host = 4 }`; for specs that ask for nothing but the image."""
    warm_check_s: float = Field(default=5.0, gt=0)
    """A ready sandbox that does not run `true` in this time is replaced instead of handed out."""
    warm_ttl_s: float = Field(default=120.0, gt=0)
    """Lease of a ready sandbox; the pool renews it."""

    @model_validator(mode="after")
    def _warm_leaves_room(self) -> PoolConfig:
        wanted, room = sum(self.warm.values()), self.max_live - self.evaluation_reserve
        if wanted >= room or min(self.warm.values(), default=0) < 0:
            raise ValueError(
                f"warm={self.warm} must be counts below {room} together (max_live - evaluation_reserve): they take "
                "places too"
            )
        return self
