"""Environment of programs that headrace starts and that do not use Ray.

Invariant: such a program gets no secret from the environment. Ray's token lets its holder run code on every host of the
cluster, and an engine or an image tool needs neither that nor an API key: keys of engines are passed as private files.
"""

from __future__ import annotations

import os
import re
from typing import Final

_SECRET: Final = re.compile(r"RAY_AUTH_.*|(?:.*_)?(?:KEY|TOKEN|PASSWORD|SECRET|CREDENTIALS)", re.IGNORECASE)
"""Names of variables that are removed: Ray's token, the path of its file, and whatever is named like a secret, such as
E2B_API_KEY, HF_TOKEN or RAY_REDIS_PASSWORD."""


def child_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment without secrets, with the given variables added or replaced."""
    return {name: value for name, value in os.environ.items() if not _SECRET.fullmatch(name)} | changes
