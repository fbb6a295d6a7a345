"""Startup hook for CPU servers, which Python runs in every process, including those that SGLang spawns.

torchvision's wheels are built for CUDA: with a CPU build of torch, its library is not loaded, and the operators that it
registers on import have no schemas. This module defines the schemas just before torchvision is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from types import ModuleType
from typing import Any

_kept: list[Any] = []


class _BeforeTorchvision(MetaPathFinder):
    """Finder that never finds a module; it only serves as a hook that runs before the import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            if not version("torchvision").endswith("+cpu"):
                _define_schemas()
        return None


def _define_schemas() -> None:
    import torch

    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]
    # The schemas are removed when the library is garbage-collected.
    _kept.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
