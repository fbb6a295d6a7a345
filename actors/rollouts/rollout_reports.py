"""What the agent, the session and the evaluator of an evaluation rollout report."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from headrace.actors.agents.programs.agent import AgentReport
from headrace.actors.evaluation.graders.evaluation import Verdict
from headrace.serve.gateway.capture.rows import SessionReport

MAX_RESULT_CHARACTERS, MAX_COMMANDS = 4000, 1000


@dataclass(slots=True)
class RolloutReports:
    """Reports of the agent, the session and the evaluator; None for parts that the rollout did not reach."""

    agent: AgentReport | None = None
    session: SessionReport | None = None
    verdict: Verdict | None = None

    def metadata(self) -> dict[str, Any]:
        """Return the fields of metadata.json other than those of the answer."""
        metadata: dict[str, Any] = {}
        if self.agent is not None:
            metadata["agent"] = {
                "stop": self.agent.stop.value,
                "exit_code": self.agent.exit_code,
                "result": self.agent.result[:MAX_RESULT_CHARACTERS],
                "log_tail": self.agent.log_tail[-MAX_RESULT_CHARACTERS:],
                "commands": list(self.agent.commands[:MAX_COMMANDS]),
            }
        if self.agent is not None and self.agent.judgement is not None:
            metadata["judge"] = json.loads(self.agent.judgement.artifact())
        if self.session is not None:
            metadata["session"] = {
                "session_id": self.session.session_id,
                "turns": self.session.turns,
                "sampled_tokens": self.session.sampled_tokens,
                "masked": dict(self.session.masked),
                "rows": len(self.session.lineages),
                "exhausted": self.session.exhausted.value,
                "failures": list(self.session.failures),
            }
        if self.verdict is not None and self.verdict.parts:
            metadata["reward_parts"] = {
                name: {"reward": reward, "weight": weight} for name, (reward, weight) in self.verdict.parts.items()
            }
        return metadata
