"""The versions of agents that `scripts/install agents` installs and the tests run with."""

from __future__ import annotations

from pathlib import Path
from typing import Final

CLAUDE_CODE: Final = "2.1.197"
CODEX: Final = "0.169.0"
QWEN_CODE: Final = "0.15.10"
OPENCODE: Final = "1.18.33"
NODE: Final = "20.20.2"
"""Version of Node for qwen-code, which needs 20 or later."""
MINI_SWE_AGENT: Final = "2.4.6"
LITELLM: Final = "1.106.2"
MCP: Final = "2.3.0"
"""Version of mcp, which litellm imports for tool calls but does not declare as a requirement."""
_PINNED_TOGETHER: Final = Path(__file__).with_name("mini_swe_agent_requirements.txt")


def mini_swe_agent_requirements() -> tuple[str, ...]:
    """Return the packages that mini-swe-agent needs, itself included, each with its version."""
    lines = _PINNED_TOGETHER.read_text(encoding="utf-8").splitlines()
    pinned = (line for line in lines if not line.startswith("#"))
    return (f"mini-swe-agent=={MINI_SWE_AGENT}", f"litellm=={LITELLM}", f"mcp=={MCP}", *pinned)
