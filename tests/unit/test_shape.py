"""`scripts/shape.py`, over small trees with one fault each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SHAPE = Path(__file__).resolve().parents[2] / "scripts" / "shape.py"
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from headrace.{0} import X\n"
BODY = "    x = 1\n"
FAULTS = {
    "a circle": (
        {
            "buffer/tasks.py": "def f():\n    import headrace.buffer.types\n",
            "buffer/types.py": FOR_TYPES.format("buffer.tasks"),
        },
        "these modules import each other in a cycle: buffer.t",
    ),
    "neighbours in a package": (
        {
            "sandboxes/base.py": "from headrace.sandboxes.pool import slots\n",
            "sandboxes/pool/slots.py": "",
            "sandboxes/pool/warm.py": FOR_TYPES.format("sandboxes.base"),
        },
        "neighbours in sandboxes import each other: ",
    ),
    "packages": (
        {"sandboxes/a.py": "import headrace.serve.b\n", "serve/b.py": "", "serve/c.py": "import headrace.sandboxes.a"},
        "neighbours in the top folder import each other: ",
    ),
    "neighbours three folders deep": (
        {
            "buffer/core/mix/names.py": "",
            "buffer/core/mix/admission.py": "from headrace.buffer.core.curriculum import X\n",
            "buffer/core/curriculum.py": "def f():\n    from headrace.buffer.core.mix import names\n",
        },
        "buffer.core.curriculum imports buffer.core.mix.names",
    ),
    "a circle of three neighbours": (
        {
            "serve/a/b/one/x.py": "from headrace.serve.a.b.two import y\n",
            "serve/a/b/two/y.py": "",
            "serve/a/b/two/z.py": "from headrace.serve.a.b import three\n",
            "serve/a/b/three.py": "import headrace.serve.a.b.one.w\n",
            "serve/a/b/one/w.py": "",
        },
        "neighbours in serve.a.b import each other: ",
    ),
    "a long function": ({"serve/errors.py": f"def f():\n{BODY * 70}"}, "serve/errors.py:1 f: 71 lines, at most 70"),
    "functions with one caller": (
        {"serve/errors.py": "".join(f"def f{n}(): _g{n}()\ndef _g{n}(): pass\n" for n in range(50))},
        "50.0% of the functions are private and have one caller, at most 8%; one is serve/errors.py _g49",
    ),
    "a long class": (
        {"serve/errors.py": f"class C:\n{BODY * 400}"},
        "headrace.serve.errors.C: 401 lines with its bases, at most 400",
    ),
    "a class cut in two": (
        {
            "serve/errors.py": f"from headrace.serve.base import B\nclass C(B):\n{BODY * 200}",
            "serve/base.py": f"class B(C):\n{BODY * 199}class C:\n{BODY}",
        },
        "headrace.serve.errors.C: 403 lines with its bases, at most 400",
    ),
    "a folder of many entries": (
        {f"serve/capture/m{number}.py": "" for number in range(24)} | {"serve/capture/templates/page.html": ""},
        "serve/capture: 25 files and folders, at most 24",
    ),
    "a deep folder": ({"serve/a/b/c/d.py": "", "serve/a/b/c/d/e.py": ""}, "serve/a/b/c/d: 5 folders deep, at most 4"),
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
