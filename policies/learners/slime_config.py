"""Configuration of the slime learner."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from headrace.buffer.primitives.sections import Section


class SlimeSection(Section):
    """Section [learner.slime] of a recipe: devices, checkouts and flags of slime."""

    slime_dir: Path | None = None
    """Checkout of slime (THUDM/slime); None uses the `slime` package that this Python imports."""
    megatron_dir: Path | None = None
    """Checkout of NVIDIA/Megatron-LM; None uses the `megatron` package that this Python imports."""
    nodes: int = Field(default=1, ge=1)
    """Number of nodes that train."""
    gpus_per_node: int = Field(default=8, ge=1)
    """GPUs of each of these nodes that train; engines need GPUs of their own."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs that share each layer."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Stages of consecutive layers."""
    context_parallel: int = Field(default=1, ge=1)
    """GPUs that share each row."""
    expert_parallel: int = Field(default=1, ge=1)
    """GPUs that share the experts of each layer."""
    timeout_minutes: int = Field(default=10, ge=1)
    """Time limit of a collective, after which the ranks that wait in it fail."""
    model: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Model with the architecture of `model.path`, a file of slime's scripts/models without `.sh`: `qwen3-32B`. None
    takes the one whose flags agree with the model's config.json, if `arguments` describe no architecture."""
    arguments: tuple[str, ...] = ()
    """Further flags of slime and Megatron, with their values: memory and kernels, and the model's architecture where
    slime has no file for it. Flags that the recipe decides are refused."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the training processes and of slime's parser. CUDA_DEVICE_MAX_CONNECTIONS is 1, and
    NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE are 0, where neither this table nor the learner's node sets them."""

    @property
    def gpus(self) -> int:
        """Number of GPUs that train."""
        return self.nodes * self.gpus_per_node

    @property
    def data_parallel(self) -> int:
        """Number of copies of the model."""
        return self.gpus // (self.tensor_parallel * self.pipeline_parallel * self.context_parallel)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        model = self.tensor_parallel * self.pipeline_parallel * self.context_parallel
        if self.gpus % model:
            raise ValueError(
                f"{self.gpus} GPUs (nodes x gpus_per_node) are not a multiple of {model} (tensor_parallel x "
                "pipeline_parallel x context_parallel): change either"
            )
        if (self.slime_dir is None) != (self.megatron_dir is None):
            raise ValueError("slime_dir and megatron_dir go together: set both checkouts or neither")
        if "PYTHONPATH" in self.environment:
            raise ValueError(
                "environment.PYTHONPATH is set by headrace (checkouts, then its own): set it in headrace's environment"
            )
        return self
