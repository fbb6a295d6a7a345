"""Command line that starts a module of this package in a Python process with only the standard library.

Invariants: there are no site-packages, no environment, and no working folder on the module path. The package is located
from this file's folder, so that an editable install, a wheel and a plain checkout behave alike.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

# `headrace` and `headrace.sandboxes` are made here: the import hooks of an editable install are in site-packages.
_BOOTSTRAP: Final = """
import importlib, sys, types
package = types.ModuleType("headrace")
package.__path__ = []
folder = types.ModuleType("headrace.sandboxes")
folder.__path__ = [sys.argv[1]]
sys.modules.update({"headrace": package, "headrace.sandboxes": folder})
importlib.import_module("headrace.sandboxes." + sys.argv[2]).main()
"""


def stdlib_command(module: str) -> tuple[str, ...]:
    """Return the command line that runs `main()` of headrace.sandboxes.<module>."""
    return (sys.executable, "-I", "-S", "-c", _BOOTSTRAP, str(Path(__file__).parents[1]), module)
