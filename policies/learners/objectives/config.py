"""Configuration of the objective. Needs no torch.

Invariants:
- A ratio is current / behaviour: the probability of a token under the weights in training, divided by that under the
  weights that sampled it. With one update per batch there is no other ratio, because current / proximal is always 1.
- A ratio is corrected once: a combination that would bound or multiply by it twice is refused.
"""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, model_validator

from headrace.buffer.primitives.sections import Section

GSPO_CLIP: Final = 0.01
"""GSPO's paper clips the mean over a row at 3e-4 and 4e-4; GRPO's clips would never act on it."""
PPO: Final = "ppo"
"""Objective whose advantages are those of a critic."""
OWN: Final = ("grpo", "gspo", "cispo", PPO)
"""headrace's own objectives. Each uses the ratio, and clips it."""

UNCLIPPED: Final = ("icepop", "tis")
"""Corrections with which grpo and ppo have no clip."""

Correction = Literal["cap", "icepop", "tis", "weights", "none", "decoupled"]
"""`decoupled` is always refused, with the reason."""


class ObjectiveConfig(Section):
    """Objective, off-policy correction, regularisation and normalisation of the loss (guide 'Objectives')."""

    objective: str = "grpo"
    """Policy loss: `grpo` (PPO's clip for each token), `gspo` (the same for the geometric mean of the ratios of a row),
    `cispo` (clipped weights), `ppo` (that of grpo with the advantages of a critic, learner.critic), or an objective
    from another package (guide 'Extending headrace')."""
    eps_low: float = Field(default=0.2, gt=0, le=1)
    """Lower clip of the ratio current / behaviour, 1 - eps_low: with a negative advantage, a smaller ratio has no
    gradient. cispo raises smaller ratios to it; 1 turns it off."""
    eps_high: float = Field(default=0.28, gt=0)
    """Upper clip of the ratio current / behaviour, 1 + eps_high: with a positive advantage, a larger ratio has no
    gradient. cispo lowers larger ratios to it."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Ratio above which a token (gspo: a row) with a negative advantage has no gradient. None: no such clip."""
    correction: Correction = "cap"
    """Off-policy correction beside the clip. `cap`: the ratio inside the objective is at most weight_cap. `icepop`:
    tokens whose ratio is outside weight_floor to weight_cap are masked, and grpo and ppo clip nothing. `tis`: the
    weight of a token is its ratio, at most weight_cap, and grpo and ppo clip nothing. `weights`: the loss of a token is
    multiplied by its ratio, at most weight_cap; only for objectives of other packages that do not use the ratio.
    `none`: nothing, which is the default with `kind = "slime"`."""
    weight_cap: float = Field(default=2.0, gt=0)
    """Maximum ratio, for `correction`."""
    weight_floor: float = Field(default=0.5, ge=0)
    """Minimum ratio, for the correction `icepop`."""
    sequence_mask: float | None = Field(default=None, gt=0)
    """A row with a negative advantage is masked if the mean of log(behaviour / current) over its trained tokens exceeds
    this. None: no such mask."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the KL divergence to the start model. Above 0, the learner keeps a second, frozen copy of that
    model, and computes its log-probabilities for every batch."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence for each token (guide 'Objectives'). The gradient of `k2` is that of the divergence;
    `k3` is GRPO's, clamped to 10; the gradient of `k1` is 0 on average, so it only measures."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy, which is added to what is maximised."""
    observation_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the cross-entropy of observations, ECHO's second term (guide 'Objectives'). Above 0, gateways
    record the kinds of tokens, and rows without advantage are computed."""
    observation_target: Literal["environment", "full"] = "environment"
    """Tokens of that term: `environment` leaves out the parts of observations that are marked as warnings, `full` takes
    them too."""
    observation_mean: Literal["sequence", "token"] = "sequence"
    """Mean of that term: `sequence` is the mean over rows of the means over their observed tokens, `token` the mean
    over all selected tokens of a batch."""
    observation_schedule: Literal["constant", "linear_decay", "step_decay"] = "constant"
    """observation_coef over the updates of a run: `linear_decay` falls to 0 at observation_decay_steps, `step_decay` is
    halved every observation_decay_steps."""
    observation_decay_steps: int | None = Field(default=None, ge=1)
    """Number of updates, for `observation_schedule`."""
    loss_weight: Literal["trajectory", "token", "constant"] = "trajectory"
    """Weight of a token in a batch: `trajectory` is the mean over trajectories of the means over their tokens, `token`
    the mean over all tokens, `constant` the sum over tokens, divided by loss_constant and the number of
    trajectories."""
    loss_constant: float | None = Field(default=None, gt=0)
    """Number of tokens by which `loss_weight = "constant"` divides, for example the longest possible answer."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        for check in _CHECKS:
            if (problem := check(self)) is not None:
                raise ValueError(problem)
        return self

    @property
    def uses_zero_advantage(self) -> bool:
        """True if a trained token without advantage has a gradient from a term other than the policy loss."""
        return self.kl_coef > 0 or self.entropy_coef > 0

    @property
    def deviations(self) -> tuple[str, ...]:
        """What differs from the papers and probably was not meant, one sentence each (guide 'Objectives')."""
        found = []
        if self.objective == "gspo" and max(self.eps_low, self.eps_high) > GSPO_CLIP:
            clips = f"eps_low {self.eps_low:g} and eps_high {self.eps_high:g}"
            found.append(f"gspo clips at {clips}, its paper at 0.0003 and 0.0004: nothing is clipped")
        if self.objective == "cispo" and self.loss_weight != "token":
            found.append(f'cispo has loss_weight "{self.loss_weight}", its paper the mean over all tokens: "token"')
        return tuple(found)

    @property
    def needs_kinds(self) -> bool:
        """True if a term needs the kinds of tokens (`Row.kinds_T`), in rows without advantage too."""
        return self.observation_coef > 0

    def observation_coef_at(self, step: int) -> float:
        """Return the coefficient of the cross-entropy of observations at an update, counted from 0."""
        span = self.observation_decay_steps
        if span is None:
            return self.observation_coef
        if self.observation_schedule == "linear_decay":
            return self.observation_coef * max(0.0, 1.0 - step / span)
        return self.observation_coef * float(0.5 ** (step // span))


def corrected_twice(objective: str) -> str:
    """Return why `correction = "weights"` cannot be used with an objective that has the ratio already."""
    return (
        f"correction weights multiplies the loss by current / behaviour, and objective {objective} already uses that "
        "ratio: each token would be corrected twice; set learner.correction to cap, which bounds the ratio inside the "
        "objective, or to none"
    )


def _is_not_decoupled(config: ObjectiveConfig) -> str | None:
    if config.objective != "decoupled_ppo" and config.correction != "decoupled":
        return None
    return (
        "decoupled PPO clips current / proximal, which is always 1 with one update per batch: its clip would never act "
        "and only its weights would be left, which learner.correction tis has; set learner.objective to grpo and "
        "learner.correction to cap, which clip current / behaviour"
    )


def _ratio_is_corrected_once(config: ObjectiveConfig) -> str | None:
    if config.correction != "weights" or config.objective not in OWN:
        return None
    return corrected_twice(config.objective)


def _cap_is_above_the_clip(config: ObjectiveConfig) -> str | None:
    clip = 1 + config.eps_high
    if config.objective != "cispo" or config.correction != "cap" or config.weight_cap >= clip:
        return None
    return (
        f"weight_cap {config.weight_cap:g} is below objective cispo's own bound of the same ratio, 1 + eps_high = "
        f"{clip:g}; lower learner.eps_high, or set learner.correction to none"
    )


def _cispo_has_no_dual_clip(config: ObjectiveConfig) -> str | None:
    if config.objective != "cispo" or config.dual_clip is None:
        return None
    return (
        "dual_clip has no effect with objective cispo, whose weights are at most 1 + eps_high; remove learner.dual_clip"
    )


def _one_bound_of_the_ratio(config: ObjectiveConfig) -> str | None:
    defaults = {name: ObjectiveConfig.model_fields[name].default for name in ("eps_low", "eps_high", "dual_clip")}
    given = [name for name, default in defaults.items() if getattr(config, name) != default]
    if config.correction == "tis" and config.objective not in ("grpo", PPO):
        return f"correction tis weighs tokens in place of objective {config.objective}; set learner.objective to grpo"
    if config.correction not in UNCLIPPED or config.objective not in ("grpo", PPO) or not given:
        return None
    bounds = "weight_floor and weight_cap" if config.correction == "icepop" else "weight_cap"
    return (
        f"{given[0]} has no effect with correction {config.correction}, which bounds the same ratio by {bounds}: "
        f"remove learner.{given[0]}"
    )


def _mask_leaves_something(config: ObjectiveConfig) -> str | None:
    if config.correction != "icepop" or config.weight_floor < 1 < config.weight_cap:
        return None
    return (
        f"correction icepop keeps ratios from weight_floor {config.weight_floor:g} to weight_cap "
        f"{config.weight_cap:g}, which must contain 1 in between: lower learner.weight_floor or raise "
        "learner.weight_cap"
    )


def _constant_goes_with_its_weight(config: ObjectiveConfig) -> str | None:
    if (config.loss_weight == "constant") == (config.loss_constant is not None):
        return None
    if config.loss_constant is None:
        return "loss_weight constant needs learner.loss_constant, the number of tokens to divide by; set it"
    return (
        f"loss_constant has no effect with loss_weight {config.loss_weight}; remove it or set learner.loss_weight to "
        "constant"
    )


def _decay_goes_with_its_steps(config: ObjectiveConfig) -> str | None:
    if (config.observation_schedule == "constant") == (config.observation_decay_steps is None):
        return None
    if config.observation_decay_steps is None:
        return (
            f"observation_schedule {config.observation_schedule} needs learner.observation_decay_steps, a number of "
            "updates; set it"
        )
    return (
        "observation_decay_steps has no effect with observation_schedule constant; remove it or set "
        "learner.observation_schedule to linear_decay or step_decay"
    )


_CHECKS = (
    _is_not_decoupled,
    _ratio_is_corrected_once,
    _cap_is_above_the_clip,
    _cispo_has_no_dual_clip,
    _one_bound_of_the_ratio,
    _mask_leaves_something,
    _constant_goes_with_its_weight,
    _decay_goes_with_its_steps,
)
"""Each returns the problem with the keys to change, or None."""
