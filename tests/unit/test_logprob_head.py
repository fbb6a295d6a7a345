"""The head agrees with a log-softmax over all positions, in value, gradient and entropy, whatever the chunks."""

from __future__ import annotations

import pytest
import torch
from benches.learner.memory import head_memory_ratio, peak_bytes

from headrace.policies.learners.logprob_head import trained_logprobs

ROWS, LENGTH, HIDDEN, VOCABULARY = 3, 7, 5, 11


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(ROWS, LENGTH, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    trained = torch.rand(ROWS, LENGTH, generator=generator) < 0.5
    trained[:, 0] = False
    temperatures = 0.5 + torch.rand(int(trained.sum()), generator=generator)
    return hidden, weight, tokens, trained, temperatures


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor, trained: torch.Tensor, temperatures: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden @ weight.T)[:, :-1][trained[:, 1:]] / temperatures[:, None]
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(-1, tokens[:, 1:][trained[:, 1:]][:, None])[:, 0]
    return chosen, torch.special.entr(logprobs.exp()).sum(-1)


@pytest.mark.parametrize("chunk_logits", [1, 3 * VOCABULARY, 10_000])
@pytest.mark.parametrize("scales", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)])
def test_values_and_gradients_are_those_of_a_full_softmax(chunk_logits: int, scales: tuple[float, float]) -> None:
    results = []
    for head in (plain, lambda *given: trained_logprobs(*given, chunk_logits=chunk_logits)):
        given = inputs(torch.float64)
        chosen, entropies = head(*given)
        used = [
            scale * (values * torch.arange(len(values))).sum()
            for scale, values in zip(scales, (chosen, entropies), strict=True)
            if scale
        ]
        sum(used).backward()
        results.append((chosen, entropies, given[0].grad, given[1].grad))
    for expected, got in zip(*results, strict=True):
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_bf16_weights_are_reduced_in_fp32() -> None:
    given = inputs(torch.bfloat16)
    chosen, entropies = trained_logprobs(*given, chunk_logits=VOCABULARY)
    (chosen.sum() + entropies.sum()).backward()
    assert chosen.dtype == entropies.dtype == torch.float32
    assert given[0].grad.dtype == given[1].grad.dtype == torch.bfloat16
    exact = inputs(torch.float64)
    expected, _ = plain(exact[0].bfloat16().double(), exact[1].bfloat16().double(), *exact[2:])
    assert (chosen.double() - expected).abs().max() < 0.05


def test_memory_does_not_grow_with_the_positions_that_are_not_trained() -> None:
    assert head_memory_ratio(positions=1024, hidden=16, vocabulary=4096, trained_share=0.05) <= 0.1


def test_memory_of_many_trained_positions_is_that_of_a_chunk() -> None:
    generator = torch.Generator().manual_seed(1)
    positions, vocabulary = 512, 4096
    hidden = torch.randn(1, positions + 1, 4, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, 4, generator=generator).requires_grad_()
    tokens = torch.randint(vocabulary, (1, positions + 1), generator=generator)
    trained = torch.ones(1, positions + 1, dtype=torch.bool)

    def step() -> None:
        given = (hidden, weight, tokens, trained, torch.ones(positions))
        chosen, entropies = trained_logprobs(*given, chunk_logits=10 * vocabulary)
        (chosen.sum() + entropies.sum()).backward()

    assert peak_bytes(step) < positions * vocabulary * 4 / 8


def test_the_peak_is_the_largest_sum_of_live_tensors() -> None:
    def work() -> torch.Tensor:
        first = torch.ones(1 << 20)
        second = first + 1
        del first
        return second.double()

    assert peak_bytes(work) == 3 * (4 << 20)
