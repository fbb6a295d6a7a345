"""The optimizer whose step stands in the group: torch's AdamW, number for number."""

from __future__ import annotations

import copy

import pytest
import torch

from headrace.policies.learners.slime.adam import GroupStepAdam

SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(5, 3, generator=generator, dtype=torch.float64)) for _ in range(3)]


def step(optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for parameter in optimizer.param_groups[0]["params"][:2]:
        parameter.grad = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    optimizer.step()


def test_it_updates_as_adamw() -> None:
    ours = GroupStepAdam(parameters(), **SETTINGS)  # type: ignore[arg-type]
    reference = torch.optim.AdamW(parameters(), foreach=False, **SETTINGS)  # type: ignore[arg-type]
    for number in range(20):
        step(ours, number)
        step(reference, number)
    for mine, wanted in zip(ours.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-15)
    assert ours.param_groups[0]["step"] == 20
    assert ours.state[ours.param_groups[0]["params"][2]] == {}, "a parameter without a gradient keeps no moments"


def test_a_restored_state_repeats_the_next_step() -> None:
    ours = GroupStepAdam(parameters(), **SETTINGS)  # type: ignore[arg-type]
    for number in range(3):
        step(ours, number)
    state = copy.deepcopy(ours.state_dict())
    restored = GroupStepAdam(copy.deepcopy(ours.param_groups[0]["params"]), **SETTINGS)  # type: ignore[arg-type]
    restored.load_state_dict(state)
    for optimizer in (ours, restored):
        step(optimizer, 3)
    for mine, wanted in zip(restored.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, wanted)


def test_l2_regularisation_and_closures_are_refused() -> None:
    with pytest.raises(ValueError, match="only decoupled weight decay"):
        GroupStepAdam(parameters(), adam_w_mode=False)
    with pytest.raises(ValueError, match="closure"):
        GroupStepAdam(parameters()).step(lambda: 0.0)
