"""`scripts/shape.py`, over small trees with one fault each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SHAPE = Path(__file__).resolve().parents[2] / "scripts" / "shape.py"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headrace.buffer.{0} import X\n"
METHODS = "".join(f"    def m{number}(self): ...\n" for number in range(26))
BODY = "    x = 1\n"
FAULTS = {
    "a circle": (
        {
            "buffer/tasks.py": "def f():\n    import headrace.buffer.types\n",
            "buffer/types.py": FOR_TYPES.format("tasks"),
        },
        "these modules import each other in a cycle: buffer.t",
    ),
    "an import that goes upwards": (
        {"sandboxes/base.py": "from headrace.sandboxes.pool import slots\n", "sandboxes/pool/slots.py": ""},
        "sandboxes.base imports sandboxes.pool.slots, which is above it",
    ),
    "an import of a name that goes upwards": (
        {"serve/capture/trie.py": "from headrace.serve.gateway.turns import X\n", "serve/gateway/turns.py": ""},
        "serve.capture.trie imports serve.gateway.turns, which is above it",
    ),
    "a folder in no order": ({"serve/new/thing.py": ""}, "serve/new is missing from ORDER"),
    "a module in no order": ({"serve/new.py": ""}, "serve/new is missing from ORDER"),
    "a long function": ({"serve/errors.py": f"def f():\n{BODY * 70}"}, "serve/errors.py:1 f: 71 lines, at most 70"),
    "a class with many methods": (
        {"serve/errors.py": f"class C:\n{METHODS}"},
        "serve/errors.py:1 C: 27 lines and 26 methods, at most 300 and 25",
    ),
    "functions with one caller": (
        {"serve/errors.py": "".join(f"def f{n}(): _g{n}()\ndef _g{n}(): pass\n" for n in range(50))},
        "50.0% of the functions are private and have one caller, at most 8%; one is serve/errors.py _g49",
    ),
    "a long class": ({"serve/errors.py": f"class C:\n{BODY * 300}"}, "C: 301 lines and 0 methods, at most 300 and 25"),
    "a folder of many modules": (
        {f"serve/capture/m{number}.py": "" for number in range(21)},
        "serve/capture: 21 modules, at most 20",
    ),
}


def shape(folder: Path) -> tuple[int, list[str]]:
    told = subprocess.run([sys.executable, str(SHAPE)], cwd=folder, capture_output=True, text=True, timeout=60)
    assert told.stderr == ""
    return told.returncode, told.stdout.splitlines()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize("name", FAULTS)
def test_every_kind_of_shape_fault_is_reported(tmp_path: Path, name: str) -> None:
    files, said = FAULTS[name]
    write(tmp_path, files)
    code, lines = shape(tmp_path)
    assert (code, any(said in line for line in lines)) == (1, True), lines


def test_downward_imports_of_every_kind_are_allowed(tmp_path: Path) -> None:
    above = "import headrace.buffer.tasks\nfrom headrace.buffer import errors\nfrom headrace.sandboxes.base import X\n"
    write(tmp_path, {"buffer/types.py": above, "buffer/tasks.py": "", "buffer/errors.py": "", "sandboxes/base.py": ""})
    assert shape(tmp_path) == (0, [])
