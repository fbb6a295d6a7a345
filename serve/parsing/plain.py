"""The parser of outputs without calls, which finds reasoning and text only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.serve.parsing.scanner import scan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.serve.conversation import ToolSpec
    from headrace.serve.parsing.base import ParsedOutput


class PlainParser:
    """Implements `base.OutputParser`."""

    def parse(self, text: str, tools: Sequence[ToolSpec], *, in_reasoning: bool) -> ParsedOutput:
        del tools
        return scan(text, None, in_reasoning=in_reasoning)
