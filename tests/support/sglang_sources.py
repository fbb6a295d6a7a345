"""Sources of a package `sglang` that has what headrace sends, for tests that start no SGLang."""

from __future__ import annotations

from pathlib import Path

from headrace.policies.sglang.sources import REQUESTS, VARIABLES


def write_sglang_sources(package: Path) -> Path:
    """Write the classes of requests, the variables and no loader; return the package."""
    classes = [
        f"class {kind}:\n" + "".join(f"    {name}: object\n" for name in names)
        for kind, *names in map(str.split, REQUESTS.values())
    ]
    (package / "srt" / "models").mkdir(parents=True)
    (package / "srt" / "managers").mkdir()
    (package / "srt" / "managers" / "io_struct.py").write_text("\n".join(classes))
    for name, file in VARIABLES.items():
        (package / file).parent.mkdir(parents=True, exist_ok=True)
        with (package / file).open("a") as text:
            text.write(f"{name} = None\n")
    return package
