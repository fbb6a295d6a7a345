"""Which checks need no interpreter of their image."""

from __future__ import annotations

import pytest

from headrace.actors.evaluation.graders.checks import imports_only
from headrace.actors.evaluation.in_sandbox import source
from headrace.buffer.tasks.datasets.terminal import STATE_CHECK
from headrace.sandboxes.launcher.commands import PRELOADED

PLAIN = [
    "",
    "reward = 1",
    "import os, sys; import json as j",
    "from os import path\nfrom re import *",
    STATE_CHECK.format(expected="{}"),
]
OTHERS = [
    "import pytest",
    "import os, hashlib",
    "import os.path as p",
    "def f():\n    import numpy",
    "from calc import total",
    "from . import x",
    "__import__('hashlib')",
    "def",
    "\0",
    "(" * 10_000,
]


@pytest.mark.parametrize("check", PLAIN)
def test_checks_with_preloaded_imports_are_plain(check: str) -> None:
    assert imports_only(check, PRELOADED)


@pytest.mark.parametrize("check", OTHERS, ids=lambda text: repr(text[:20]))
def test_checks_with_other_imports_are_not_plain(check: str) -> None:
    assert not imports_only(check, PRELOADED)


def test_programs_without_an_interpreter_import_only_preloaded_modules() -> None:
    assert imports_only(source("collect_files"), PRELOADED | {"__future__"})
