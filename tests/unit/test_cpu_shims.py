"""The shim changes one function, and only for a learner on the CPU."""

from __future__ import annotations

import pytest
import torch

from headrace.policies.errors import DeviceMissing
from headrace.policies.learners import megatron_world


@pytest.fixture(autouse=True)
def keep_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what a test installs; a learner in this process may already have installed it."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_on_the_cpu_only_the_current_device_is_replaced() -> None:
    before = dict(vars(torch.cuda))
    megatron_world.use_cpu_device()
    after = vars(torch.cuda)
    assert {name for name in before if after[name] is not before[name]} == {"current_device"}
    assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_learner_on_cuda_is_refused_without_a_device_and_changes_nothing() -> None:
    before = torch.cuda.current_device
    with pytest.raises(DeviceMissing, match=r"set learner.device to cpu"):
        megatron_world.start(0, "cuda")
    assert torch.cuda.current_device is before
    assert not torch.distributed.is_initialized()
