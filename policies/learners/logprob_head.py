"""Log-probabilities and entropies of trained tokens, from the last hidden states, in chunks of positions.

Invariants:
- Nothing of the size positions x vocabulary outlives a chunk: the backward pass computes the logits of a chunk again.
- Logits are divided by the temperature and reduced in fp32 (fp64 for fp64 weights), whatever the weights' dtype.
- The chunk size changes results only by rounding.

Shapes: B rows, T tokens, N trained tokens, D hidden size, V vocabulary, C trained tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_LOGITS = 1 << 25
"""Number of logits to compute at once (128 MB in fp32), but at least those of one position."""


def trained_logprobs(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    tokens_BT: Tensor,
    trained_BT: Tensor,
    temperatures_N: Tensor,
    *,
    chunk_logits: int = CHUNK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies (nats) of the N trained tokens in row-major order, each of shape N, for
    softmax(hidden @ weight.T / temperature), with gradient to `hidden_BTD` and `weight_VD`.

    The hidden state at position t predicts the token at t + 1: the first token of a row cannot be trained."""
    predicts_BT = trained_BT[:, 1:]
    hidden_ND, targets_N = hidden_BTD[:, :-1][predicts_BT], tokens_BT[:, 1:][predicts_BT]
    logprobs: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(
        hidden_ND, weight_VD, targets_N, temperatures_N, chunk_logits
    )  # type: ignore[no-untyped-call]
    return logprobs


class _ChunkedLogprobs(torch.autograd.Function):
    """With p the probabilities and H the entropy, the derivatives to the scaled logits are onehot(target) - p for the
    log-probability, and -p (log p + H) for the entropy."""

    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperatures_N: Tensor, chunk_logits: int
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(weight_VD.dtype, torch.float32)
        chosen_N, normalisers_N, entropies_N = (hidden_ND.new_empty(len(hidden_ND), dtype=wide) for _ in range(3))
        for chunk in _chunks(len(hidden_ND), len(weight_VD), chunk_logits):
            logprobs_CV = _scaled_logits(hidden_ND[chunk], weight_VD, temperatures_N[chunk])
            normalisers_N[chunk] = logprobs_CV.logsumexp(dim=-1)
            logprobs_CV -= normalisers_N[chunk, None]
            chosen_N[chunk] = logprobs_CV.gather(-1, targets_N[chunk, None])[:, 0]
            entropies_N[chunk] = -torch.linalg.vecdot(logprobs_CV.exp(), logprobs_CV)
        ctx.save_for_backward(hidden_ND, weight_VD, targets_N, temperatures_N, normalisers_N, entropies_N)
        ctx.chunk_logits = chunk_logits
        # The gradient of an output that the loss does not use is None instead of zeros.
        ctx.set_materialize_grads(False)
        return chosen_N, entropies_N

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, chosen_grad_N: Tensor | None, entropy_grad_N: Tensor | None
    ) -> tuple[Tensor, Tensor, None, None, None]:
        hidden_ND, weight_VD, targets_N, temperatures_N, normalisers_N, entropies_N = ctx.saved_tensors
        hidden_grad_ND = torch.empty_like(hidden_ND)
        # Summed over the chunks without rounding to bf16 in between.
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=normalisers_N.dtype)
        if chosen_grad_N is None:
            chosen_grad_N = torch.zeros_like(normalisers_N)
        for chunk in _chunks(len(hidden_ND), len(weight_VD), ctx.chunk_logits):
            logprobs_CV = _scaled_logits(hidden_ND[chunk], weight_VD, temperatures_N[chunk])
            logprobs_CV -= normalisers_N[chunk, None]
            grad_CV = logprobs_CV.exp()
            scale_C1 = chosen_grad_N[chunk, None]
            if entropy_grad_N is None:
                grad_CV *= -scale_C1
            else:
                logprobs_CV += entropies_N[chunk, None]
                logprobs_CV *= -entropy_grad_N[chunk, None]
                grad_CV *= logprobs_CV.sub_(scale_C1)
            grad_CV.scatter_add_(-1, targets_N[chunk, None], scale_C1)
            grad_CV /= temperatures_N[chunk, None]
            narrow_CV = grad_CV.to(weight_VD.dtype)
            hidden_grad_ND[chunk] = narrow_CV @ weight_VD
            weight_grad_VD += narrow_CV.T @ hidden_ND[chunk]
        return hidden_grad_ND, weight_grad_VD.to(weight_VD.dtype), None, None, None


def _scaled_logits(hidden_CD: Tensor, weight_VD: Tensor, temperatures_C: Tensor) -> Tensor:
    logits_CV = torch.nn.functional.linear(hidden_CD, weight_VD)
    return logits_CV.to(torch.promote_types(weight_VD.dtype, torch.float32)).div_(temperatures_C[:, None])


def _chunks(positions: int, vocabulary: int, chunk_logits: int) -> Iterator[slice]:
    """Yield slices of the positions, of nearly equal length."""
    count = -(-positions * vocabulary // chunk_logits)
    length = max(1, -(-positions // max(1, count)))
    for start in range(0, positions, length):
        yield slice(start, start + length)
