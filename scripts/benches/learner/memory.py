"""Peak memory of work on the CPU, from the allocations that torch's profiler records."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

from headrace.policies.learners.logprob_head import trained_logprobs


def peak_bytes(work: Callable[[], object]) -> int:
    """Return the largest number of bytes that `work` has allocated at once, beyond what was allocated before.

    Counts every tensor that this thread and the backward pass allocate, and nothing else: no other process, no
    allocator and no page cache has an effect."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    # The public events of a profile contain only allocations outside of operators.
    recorded = profile.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in recorded if event.name() == "[memory]")
    largest: int = max(accumulate(size for _, size in changes))
    return largest


def head_memory_ratio(*, positions: int, hidden: int, vocabulary: int, trained_share: float) -> float:
    """Return the peak memory of the learner's head, forward and backward, over that of a log_softmax over the whole
    vocabulary at all positions with autograd."""
    generator = torch.Generator().manual_seed(0)
    hidden_BTD = torch.randn(1, positions, hidden, generator=generator).requires_grad_()
    weight_VD = torch.randn(vocabulary, hidden, generator=generator).mul_(hidden**-0.5).requires_grad_()
    tokens_BT = torch.randint(vocabulary, (1, positions), generator=generator)
    trained_BT = torch.rand(1, positions, generator=generator) < trained_share
    trained_BT[:, 0] = False

    def chunked() -> None:
        temperatures_N = torch.ones(int(trained_BT.sum()))
        logprobs_N, _ = trained_logprobs(hidden_BTD, weight_VD, tokens_BT, trained_BT, temperatures_N)
        logprobs_N.sum().backward()  # type: ignore[no-untyped-call]

    def whole() -> None:
        logprobs_BTV = (hidden_BTD @ weight_VD.T).log_softmax(-1)
        chosen_BT = logprobs_BTV[:, :-1].gather(-1, tokens_BT[:, 1:, None])[..., 0]
        chosen_BT[trained_BT[:, 1:]].sum().backward()  # type: ignore[no-untyped-call]

    peaks = []
    for work in (chunked, whole):
        hidden_BTD.grad = weight_VD.grad = None
        peaks.append(peak_bytes(work))
    return peaks[0] / peaks[1]
