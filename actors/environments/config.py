"""The config section `environment`: the kind of environment and the settings of each kind."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

from pydantic import Field

from headrace.actors.environments.retail.environment import RetailConfig
from headrace.actors.environments.search import SearchConfig
from headrace.actors.environments.shell import ShellConfig
from headrace.actors.environments.terminal import TerminalConfig
from headrace.buffer.primitives.sections import Section


class EnvironmentKind(StrEnum):
    """Environment in which the loop agent acts."""

    SHELL = "shell"
    """Each command runs in a new subshell of the sandbox."""
    TERMINAL = "terminal"
    """One shell per episode, in which folder, variables and background jobs persist."""
    SEARCH = "search"
    """Searches at a retriever, and an answer at the end."""
    RETAIL = "retail"
    """tau-bench's retail shop: tools on a database, and a simulated customer."""


WITHOUT_SANDBOX: Final = (EnvironmentKind.SEARCH, EnvironmentKind.RETAIL)
"""Environments whose rollouts boot no sandbox."""


class EnvironmentSection(Section):
    """Section [environment] of a recipe."""

    kind: EnvironmentKind | str = Field(default=EnvironmentKind.SHELL, union_mode="left_to_right")
    """Environment of the loop agent: `shell`, `terminal`, `search`, `retail`, or one from another package
    (guide 'Extending headrace')."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for an environment from another package."""
    shell: ShellConfig = ShellConfig()
    """Settings of the environment `shell`."""
    terminal: TerminalConfig = TerminalConfig()
    """Settings of the environment `terminal`."""
    search: SearchConfig = SearchConfig()
    """Settings of the search environment."""
    retail: RetailConfig | None = None
    """Settings of the retail environment, which needs `data`."""
