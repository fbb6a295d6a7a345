"""Versions of SGLang that `scripts/install sglang` installs, with their pinned requirements.

The pins were installed and run together on CPUs. SGLang's kernels and CUDA libraries are left out: its metadata
requires them, but a CPU server never uses them, and they have no CPU builds. torch is the version that headrace uses.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import cache
from typing import Final

TORCH: Final = "torch==2.13.0"
TORCHVISION: Final = "torchvision==0.28.0"
"""Release of torchvision for that torch version."""
DEFAULT_VERSION: Final = "0.5.23"

_COMMON: Final = (
    "IPython==9.18.1",
    "accelerate==1.15.0",
    "aiohttp==3.14.5",
    "anthropic==2.12.0",
    "blobfile==3.3.0",
    "compressed-tensors==0.18.0",
    "datasets==5.2.0",
    "distro==1.9.0",
    "easydict==1.14",
    "einops==0.8.2",
    "fastapi==0.165.0",
    "gguf==0.19.0",
    "interegular==0.3.3",
    "msgspec==0.22.0",
    "ninja==1.13.2",
    "numpy==2.4.6",
    "openai-harmony==0.0.4",
    "openai==2.8.0",
    # For `--enable-trace`.
    "opentelemetry-exporter-otlp-proto-grpc==1.45.2",
    "opentelemetry-exporter-otlp-proto-http==1.45.2",
    "opentelemetry-sdk==1.45.2",
    "orjson==3.13.0",
    "outlines==0.1.11",
    "packaging==26.3",
    "partial-json-parser==0.2.1.1.post7",
    "pillow==13.0.0",
    "prometheus-client==0.26.0",
    "psutil==7.2.2",
    "py-spy==0.4.3",
    "pybase64==1.5.1",
    "pydantic==2.14.3",
    "python-dateutil==2.9.0.post0",
    "python-multipart==0.0.34",
    "pyzmq==27.3.0",
    "regex==2026.11.15",
    "requests==2.34.2",
    "scipy==1.17.1",
    "sentencepiece==0.2.1",
    "setproctitle==1.3.8",
    "soundfile==0.14.0",
    "tiktoken==0.14.0",
    "tqdm==4.70.1",
    "uvicorn==0.54.0",
    "uvloop==0.23.0",
    "watchfiles==1.3.0",
    "xxhash==4.1.0",
    "zstandard==0.25.0",
)
REQUIREMENTS: Final = {
    "0.5.15.post1": (
        *_COMMON,
        "transformers==5.12.1",
        "tokenizers==0.22.2",
        "xgrammar==0.2.1",
        "llguidance>=0.7.11,<0.8",
    ),
    "0.5.21": (*_COMMON, "transformers==5.12.1", "tokenizers==0.22.2", "xgrammar==0.2.7", "llguidance>=1.7.6,<2"),
    "0.5.23": (*_COMMON, "transformers==5.19.0", "tokenizers==0.23.2", "xgrammar==0.2.7", "llguidance==1.9.1"),
}
"""Requirements by version of SGLang, except torch, torchvision and SGLang itself."""


def release(version: str) -> tuple[int, ...]:
    """Return the comparable part of a version, such as (0, 5, 15) for `0.5.15.post1`; empty if the version contains no
    number."""
    found = re.search(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


logger = logging.getLogger(__name__)
EMBEDDED_PREFIX: Final = "headrace-cpu "
"""Prefix of the embedded engine's version; that engine uses the newest dialect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangApi:
    """API of one version."""

    version: str
    update_session: bool
    """Weights are sent between /begin_weight_update and /end_weight_update; before 0.5.21 these routes are missing."""
    version_spans: bool
    """A reply has the version of each token. Without it (before 0.5.20), the version at the end labels the whole
    output, which is right only if a pause aborts: the first tokens of a request that survives a push by retract or
    in_place would be labelled with later weights."""
    refuses_unknown_groups: bool
    """An update from a group that was not joined gets a 400; before 0.5.21 it crashes the server."""
    ready_route: bool
    """The route /ready answers 503 while generation is paused (since 0.5.20)."""


DIALECTS: Final = (
    SGLangApi(
        version="0.5.15.post1",
        update_session=False,
        version_spans=False,
        refuses_unknown_groups=False,
        ready_route=False,
    ),
    SGLangApi(version="0.5.21", update_session=True, version_spans=True, refuses_unknown_groups=True, ready_route=True),
    SGLangApi(version="0.5.23", update_session=True, version_spans=True, refuses_unknown_groups=True, ready_route=True),
)
"""Known dialects, oldest first."""


@cache
def dialect_of(version: str) -> SGLangApi:
    """Return the dialect of a server's version. For an unknown version, return the newest dialect that is not newer
    than the version (or else the oldest dialect), and log one warning."""
    if version.startswith(EMBEDDED_PREFIX):
        return DIALECTS[-1]
    for dialect in DIALECTS:
        if dialect.version == version:
            return dialect
    older = [dialect for dialect in DIALECTS if release(dialect.version) <= release(version)]
    chosen = older[-1] if older else DIALECTS[0]
    logger.warning("SGLang %s is untested: it is treated as %s", version, chosen.version)
    return chosen
