"""KL divergence to a frozen reference, estimated for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

K3_BOUND = 10.0
_FAR = 20.0
"""Log ratio beyond which k3 exceeds its bound in any case; limited to it, its exponential cannot overflow."""


def kl_estimate(logprobs_N: Tensor, reference_logprobs_N: Tensor, kind: Literal["k1", "k2", "k3"]) -> Tensor:
    """Return an estimate of KL(current || reference) for each token, with gradient to `logprobs_N`.

    With d = log(reference / current): k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d
    (http://joschu.net/blog/kl-approx.html), which GRPO uses (arXiv 2402.03300, equation 4). k3 is clamped to 10, beyond
    which it has no gradient. For tokens of the current policy, the mean gradient of k2 is that of the divergence, that
    of k1 is 0, and that of k3 is that of KL(reference || current) (arXiv 2506.09477)."""
    d_N = reference_logprobs_N - logprobs_N
    if kind == "k1":
        return -d_N
    if kind == "k2":
        return d_N.square() / 2
    d_N = d_N.clamp(-_FAR, _FAR)
    return (d_N.expm1() - d_N).clamp(max=K3_BOUND)
