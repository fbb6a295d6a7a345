"""Replacement for SGLang's kernel package, which has no CPU build. Names that end in `_cpu` can be imported, and raise
when called. All other names are missing, as SGLang expects where a kernel is not built in."""

from __future__ import annotations

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., None]:
    if not name.endswith("_cpu"):
        raise AttributeError(f"module sgl_kernel has no attribute {name} here")

    def missing(*_arguments: object, **_options: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is not built for this machine")

    return missing
