"""The kept checkpoint: digest, size, and that transformers takes it as it is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from warm_start import NoisyDemonstrator, WarmStartConfig, warm_start

from headrace.actors.agents.registry.config import ShellAgentConfig
from headrace.buffer.tasks.datasets.terminal import NAMES, Kind, Split, combinations, problems
from headrace.policies.miniatures.fitting import learning_rate_at
from headrace.policies.tokens.tokenizer import ChatTokenizer

MODEL = Path(__file__).resolve().parents[2] / "scripts" / "models" / "tiny"


def test_the_weights_match_the_digest_and_are_small() -> None:
    content = (MODEL / "model.safetensors").read_bytes()
    digest, name = (MODEL / "DIGEST").read_text().split()
    assert name == "model.safetensors"
    assert hashlib.sha256(content).hexdigest() == digest
    assert len(content) < 1_000_000


def test_transformers_loads_the_folder_unchanged() -> None:
    import torch
    from transformers import Qwen3ForCausalLM

    model, notes = Qwen3ForCausalLM.from_pretrained(MODEL, output_loading_info=True, dtype=torch.float32)
    assert not any(notes[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 332_640
    assert model.get_input_embeddings().weight.shape[0] == ChatTokenizer(MODEL).vocab_size
    assert model.config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize("kind", Kind)
def test_the_policy_acts_on_what_it_read(kind: Kind) -> None:
    """Copying is there from the start: shown a held-out finding, the likeliest answer is the right command."""
    import torch
    from transformers import Qwen3ForCausalLM

    tokenizer = ChatTokenizer(MODEL)
    model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    solved = []
    for problem in [problem for problem in problems(0, 32, Split.HELD_OUT) if problem.kind is kind]:
        demonstration = NoisyDemonstrator(WarmStartConfig(), tokenizer).spell(
            problem, problem.look, problem.shown, problem.act(problem.finding)
        )
        tokens = torch.tensor([demonstration.tokens])
        start = len(demonstration.tokens) - len(tokenizer.encode(problem.act(problem.finding))) - 1
        with torch.no_grad():
            likeliest = model(tokens).logits.argmax(-1)
        solved.append(bool((likeliest[0, start - 1 : -1] == tokens[0, start:]).all()))
    assert sum(solved) >= 7


def test_the_policy_goes_on_after_an_error() -> None:
    """Silence after a failed look would be an invalid answer, and training spread it over a kind of task."""
    import torch
    from transformers import Qwen3ForCausalLM

    tokenizer = ChatTokenizer(MODEL)
    model = Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    demonstrator = NoisyDemonstrator(WarmStartConfig(), tokenizer)
    silent = []
    for problem in [problem for problem in problems(0, 32, Split.HELD_OUT) if problem.kind is Kind.WRITE]:
        missing = next(name for name in NAMES if name not in problem.files())
        error = f"cat: {missing}: No such file or directory"
        answered = demonstrator.spell(problem, f"cat {missing}", error, problem.act(problem.finding))
        answer = len(tokenizer.encode(problem.act(problem.finding))) + 1
        with torch.no_grad():
            [[*_, logits_V]] = model(torch.tensor([answered.tokens[:-answer]])).logits
        silent.append(float(logits_V.softmax(-1)[tokenizer.eos_id]))
    # Before there were such demonstrations, it was nearly 1.
    assert max(silent) < 0.1


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    config = WarmStartConfig(steps=4, practice_steps=2, batch_size=8)
    digest = warm_start(config, tmp_path / "one")
    assert warm_start(config, tmp_path / "two") == digest
    assert warm_start(config.model_copy(update={"seed": 1}), tmp_path / "three") != digest


def test_demonstrations_train_only_the_policys_tokens_and_no_held_out_tasks() -> None:
    tokenizer = ChatTokenizer(MODEL)
    demonstrator = NoisyDemonstrator(WarmStartConfig(), tokenizer)
    held_out = {
        demonstrator.spell(problem, problem.look, problem.shown, problem.act(problem.finding)).tokens
        for kind in Kind
        for problem in combinations(kind)
        if problem.split is Split.HELD_OUT
    }
    for demonstration in demonstrator.batch(400, step=0) + demonstrator.batch(400, step=600):
        trained = [token for token, mine in zip(demonstration.tokens, demonstration.trained, strict=True) if mine]
        said = tokenizer.decode(trained)
        assert said.endswith("; exit")
        assert trained[-1] == tokenizer.eos_id
        assert demonstration.tokens not in held_out


def test_demonstrations_show_as_much_output_as_the_agent_does() -> None:
    assert WarmStartConfig().max_observation_bytes == ShellAgentConfig().max_observation_bytes


def test_the_learning_rate_rises_holds_and_falls() -> None:
    config = WarmStartConfig()
    rates = [learning_rate_at(config, step) for step in range(config.steps)]
    assert rates[0] == pytest.approx(config.learning_rate / config.warmup_steps)
    assert rates[config.warmup_steps] == rates[config.steps // 2 - 1] == config.learning_rate
    assert 0 < rates[-1] < config.learning_rate / 100
