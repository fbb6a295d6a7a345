"""Prints the ids of the tests that failed, if they are few: `few_failed.py REPORT`, JUnit's XML as pytest writes it."""

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

FEW = 3


def failed(report: Path) -> list[str]:
    cases = ElementTree.parse(report).iter("testcase")
    return [_id(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]


def _id(case: ElementTree.Element) -> str:
    # pytest-xdist appends the group of a test to its name.
    name = case.attrib["name"].rpartition("@")[0] or case.attrib["name"]
    return f"{case.attrib['classname'].replace('.', '/')}.py::{name}"


if __name__ == "__main__":
    found = failed(Path(sys.argv[1]))
    if len(found) <= FEW:
        sys.stdout.writelines(f"{name}\n" for name in found)
