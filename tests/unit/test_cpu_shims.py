"""The shim acts without CUDA only."""

from __future__ import annotations

import pytest
import torch

from headrace.policies.learners import cpu_shims


@pytest.fixture(autouse=True)
def keep_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a test installs is taken back."""
    monkeypatch.setattr(torch.cuda, "current_device", torch.cuda.current_device)


def test_nothing_is_patched_where_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    before = dict(vars(torch.cuda))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    changed_by_test = {"is_available"}
    assert not cpu_shims.install()
    after = vars(torch.cuda)
    assert {name for name in before if after[name] is not before[name]} == changed_by_test


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_cuda_the_current_device_is_the_cpu() -> None:
    assert cpu_shims.install()
    assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
