"""Settings of the shell agent, which is a setting of the loop agent: every answer of the policy is one command line."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ShellAgentConfig(BaseModel):
    """Limits of one run of the agent."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(default=3, ge=1)
    """Maximum number of policy answers, including the last one."""
    command_timeout_s: float = Field(default=10.0, gt=0)
    """Deadline for one command; when it is exceeded, the policy reads `timeout`."""
    max_observation_bytes: int = Field(default=48, ge=1)
    """Maximum number of bytes of a command's output that the policy reads; small, since the tiny policy has a short
    context."""
    working_directory: str = "/workspace"
    """Working directory of every command; each one runs in a new shell."""
