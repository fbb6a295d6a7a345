"""Facts of published models from their config.json alone, and of models whose weights are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.policies.errors import ModelInvalid
from headrace.policies.models.facts import ModelFacts
from support.published_models import MODELS, PARAMETERS, described_model

TINY = Path(__file__).resolve().parents[2] / "scripts" / "models" / "tiny"


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_estimated_within_a_thousandth(tmp_path: Path, name: str) -> None:
    facts = ModelFacts.read(described_model(tmp_path, name))
    assert facts.parameters == pytest.approx(PARAMETERS[name], rel=1e-3)


@pytest.mark.parametrize(
    ("name", "context", "cache_bytes", "active"),
    [
        ("Qwen3-0.6B", 40_960, 114_688, 0.6e9),
        ("Qwen3-4B", 40_960, 147_456, 4.0e9),
        ("Qwen3-30B-A3B", 40_960, 98_304, 3.3e9),
        ("Qwen2.5-0.5B", 32_768, 12_288, 0.5e9),
        ("Mixtral-8x7B", 32_768, 131_072, 12.9e9),
        ("Qwen3.6-35B-A3B", 262_144, 20_480, 3.4e9),
    ],
)
def test_context_cache_and_active_parameters(
    tmp_path: Path, name: str, context: int, cache_bytes: int, active: float
) -> None:
    facts = ModelFacts.read(described_model(tmp_path, name))
    assert (facts.context, 2 * facts.cache_values) == (context, cache_bytes)
    assert facts.active == pytest.approx(active, rel=0.05)


def test_scaled_positions_count() -> None:
    scaled = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}
    assert ModelFacts.of(MODELS["Qwen3-4B"] | scaled).context == 131_072


def test_an_index_without_its_files_is_counted(tmp_path: Path) -> None:
    model = described_model(tmp_path, "Qwen3-4B")
    index = {"metadata": {"total_size": 2 * 123_456_789}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ModelFacts.read(model).parameters == 123_456_789


def test_weights_are_counted_exactly() -> None:
    facts = ModelFacts.read(TINY)
    assert facts.parameters == 332_640
    assert facts.parameters == pytest.approx(
        ModelFacts.of(json.loads((TINY / "config.json").read_text())).parameters, rel=5e-3
    )


def test_what_is_no_language_model_is_refused_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 12, "vocab_size": 50257}))
    with pytest.raises(ModelInvalid, match=r"config\.json: num_hidden_layers is None, but memory follows from it"):
        ModelFacts.read(tmp_path)
