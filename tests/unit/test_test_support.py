"""Which files of a repository serve its tests only: by folder, name and assertions, unless product code imports
them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.evaluation.in_sandbox import source

TEST = "from pkg import mean\nfrom {} import assert_same\n"
ASSERT = "def assert_same(one, other):\n    assert one == other\n"
PLAIN = {"pkg/__init__.py": "from pkg.core import mean\n", "pkg/core.py": "def mean(): ...\n"}


def support(tmp_path: Path, files: dict[str, str], paths: list[str], **given: Any) -> list[str]:
    for name, text in {**PLAIN, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    asked = {"workdir": str(tmp_path), "paths": paths, "tests": ["tests/test_core.py"], "hidden": {}} | given
    command = [sys.executable, "-I", "-S", "-c", source("test_support")]
    ran = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(ran.stdout)
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize("path", ["pkg/testing.py", "pkg/test/help.py", "testing/lib/help.py", "pkg/compare.py"])
def test_helpers_of_tests_serve_them(tmp_path: Path, path: str) -> None:
    module = path.removesuffix(".py").replace("/", ".")
    files = {path: ASSERT, "tests/test_core.py": TEST.format(module)}
    if path.startswith("pkg/test/"):
        files["pkg/test/__init__.py"] = ""
    assert support(tmp_path, files, [path, "pkg/core.py"]) == [path]


@pytest.mark.parametrize(
    "importer",
    ["import pkg.test.client\n", "from .test import client\n", "def f():\n    from pkg.test.client import Client\n"],
)
def test_what_product_code_imports_is_product_code(tmp_path: Path, importer: str) -> None:
    files = {"pkg/test/__init__.py": "", "pkg/test/client.py": ASSERT, "pkg/app.py": importer}
    assert support(tmp_path, files, ["pkg/test/client.py"]) == []


def test_what_only_helpers_import_serves_the_tests(tmp_path: Path) -> None:
    files = {"pkg/testing.py": "from pkg.test.deep import assert_same\n", "pkg/test/deep.py": ASSERT}
    assert support(tmp_path, files, ["pkg/test/deep.py"]) == ["pkg/test/deep.py"]


def test_a_module_with_tests_of_its_own_is_product_code(tmp_path: Path) -> None:
    files = {"pkg/testing.py": ASSERT, "tests/test_testing.py": TEST.format("pkg.testing")}
    assert support(tmp_path, files, ["pkg/testing.py"]) == []


def test_data_follow_the_code_beside_them(tmp_path: Path) -> None:
    data = ["pkg/test/page.html", "testdata/wanted.json"]
    assert support(tmp_path, {"requirements/tests.txt": ""}, ["requirements/tests.txt"]) == []
    files = dict.fromkeys(data, "") | {"pkg/test/client.py": "", "pkg/app.py": "import pkg.test.client\n"}
    assert support(tmp_path, files, data) == ["pkg/test/page.html", "testdata/wanted.json"]
    assert support(tmp_path, {"pkg/test/__init__.py": ""}, data) == ["testdata/wanted.json"]


def test_files_below_the_required_tests_serve_them_unless_tests_lie_beside_their_code(tmp_path: Path) -> None:
    hidden = {"spec/test_core.py": TEST.format("spec.same"), "pkg/test_core.py": "import pkg.core\n"}
    files = {"spec/__init__.py": "", "spec/same.py": "", "pkg/other.py": ""}
    paths = ["spec/same.py", "pkg/core.py", "pkg/other.py"]
    assert support(tmp_path, files, paths, tests=list(hidden), hidden=hidden) == ["spec/same.py"]


def test_a_new_path_may_not_stand_in_for_a_helper(tmp_path: Path) -> None:
    files = {"pkg/testing.py": ASSERT, "tests/test_core.py": TEST.format("pkg.testing")}
    paths = ["pkg/testing/__init__.py", "pkg/testing/sub/x.py", "pkg/core/__init__.py", "pkg/new/testing.py"]
    assert support(tmp_path, files, paths) == ["pkg/testing/__init__.py", "pkg/testing/sub/x.py"]
