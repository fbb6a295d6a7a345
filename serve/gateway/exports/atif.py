"""Harbor's ATIF (Agent Trajectory Interchange Format) 1.8: a session as the steps of an agent.

Invariants:
- The first branch of the session is the trajectory, and each other branch is one of its `subagent_trajectories`. A turn
  that several branches have is `is_copied_context`, without metrics, in all but its own, so that training on every step
  that is no copy trains each token at most once.
- A step of the policy is one sampled turn, with the ids that the engine received and sampled. `extra.masked` is the
  reason why it is not trained, or null.
- Texts of prompts are decoded from ids, because a session keeps no others. What is not recorded is left out: times, the
  names of agent and model, the definitions of tools (they are in the text of the first step), and which call a result
  belongs to.

Format: harbor.models.trajectories of Harbor 0.25.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from typing import Final

import orjson

from headrace.serve.gateway.capture.rows import SessionReport
from headrace.serve.gateway.capture.session import Session
from headrace.serve.gateway.conversation import Reasoning, ToolCall
from headrace.serve.gateway.exports import json_pieces
from headrace.serve.gateway.exports.branches import Branch, BranchTurn, branches_of
from headrace.serve.gateway.exports.prompt_messages import MessageShape, Source
from headrace.serve.gateway.exports.rollout_details import prompt_ids

ATIF_VERSION: Final = "ATIF-v1.8"
UNKNOWN: Final = "unknown"
NOTHING_SAMPLED: Final = "No turn was sampled in this session."
"""Message of the only step of a session without turns, since a trajectory has at least one step."""


class AtifWriter:
    """Writes sessions; `decode` returns the text of ids, and `shape` finds messages in it."""

    def __init__(self, decode: Callable[[Sequence[int]], str], shape: MessageShape) -> None:
        self._decode = decode
        self._shape = shape

    def pieces(self, session: Session, report: SessionReport) -> Iterator[bytes]:
        """Yield the pieces of a session's trajectory as JSON. The session must have kept its answers: of a turn without
        one, the message is the sampled text as it is."""
        branches = branches_of(session)
        main, others = (branches[0] if branches else None), branches[1:]
        extra = {
            "exhausted": report.exhausted,
            "failures": report.failures,
            "masked_tokens": report.masked,
            "sampled_tokens": report.sampled_tokens,
            "trained_tokens": report.trained_tokens,
        }
        more = (self._trajectory(session, branch) for branch in others)
        subagents = [("subagent_trajectories", json_pieces.array(map(json_pieces.document, more)))] if others else []
        whole = [*self._trajectory(session, main), ("extra", json_pieces.value(extra)), *subagents]
        return json_pieces.document(whole)

    def _trajectory(self, session: Session, branch: Branch | None) -> list[tuple[str, Iterator[bytes]]]:
        turns = branch.turns if branch else ()
        agent = {
            "name": (turns and turns[0].prompt.origin.agent) or UNKNOWN,
            "version": UNKNOWN,
            "extra": {"recorded_by": f"headrace {version('headrace')}", "sampling": session.spec.sampling},
        }
        owned = [turn for turn in turns if turn.is_owned]
        totals = {
            "total_prompt_tokens": sum(turn.prompt.length for turn in owned),
            "total_completion_tokens": sum(len(turn.sampled.ids) + turn.sampled.dropped for turn in owned),
            # Not known of turns that were cut.
            "total_cached_tokens": sum(turn.sampled.answer.cached_tokens for turn in owned if turn.sampled.answer),
        }
        numbered = ({"step_id": number} | step for number, step in enumerate(self._steps(turns), 1))
        return [
            ("schema_version", json_pieces.value(ATIF_VERSION)),
            ("session_id", json_pieces.value(session.spec.session_id)),
            ("trajectory_id", json_pieces.value(branch.name if branch else "0")),
            ("agent", json_pieces.value(agent)),
            ("steps", json_pieces.array(map(json_pieces.value, numbered))),
            ("final_metrics", json_pieces.value(totals)),
        ]

    def _steps(self, turns: Sequence[BranchTurn]) -> Iterator[dict[str, object]]:
        """Yield the steps of a branch, without their numbers."""
        if not turns:
            yield {"source": "system", "message": NOTHING_SAMPLED}
            return
        messages = self._messages(turns[0])
        for turn, following in zip(turns, [*turns[1:], None], strict=True):
            copied: dict[str, object] = {} if turn.is_owned else {"is_copied_context": True}
            for source, text in messages:
                # A message of the policy's in a prompt is history that was rendered again.
                yield {"source": source, "message": text} | (
                    {"is_copied_context": True} if source == "agent" else copied
                )
            step = self._sampled(turn) | copied
            messages = self._messages(following) if following is not None else []
            if following is not None and (turn.sampled.calls or following.prompt.resumes):
                # Results of calls, or text that the agent inserted into the policy's message.
                if results := [{"content": text} for source, text in messages if source == "user"]:
                    step["observation"] = {"results": results}
                messages = [(source, text) for source, text in messages if source != "user"]
            yield step

    def _messages(self, turn: BranchTurn) -> list[tuple[Source, str]]:
        """Return the messages of a turn's prompt that the turn before does not have."""
        prompt, text = turn.prompt, self._decode(turn.prompt.ids)
        if prompt.resumes:
            return [("user", text)]
        return self._shape.messages(text, is_root=prompt.parent is None, is_open=prompt.opened is not None)

    def _sampled(self, turn: BranchTurn) -> dict[str, object]:
        """Return the step of a sampled turn; it has metrics if the branch owns it."""
        node, answer = turn.sampled, turn.sampled.answer
        step: dict[str, object] = {
            "source": "agent",
            "message": answer.text if answer else self._decode(node.ids),
            "llm_call_count": 1,
            "extra": {
                "turn_id": node.turn_id,
                "status": node.status,
                "masked": turn.masked,
                "truncated": node.truncated,
                "versions": [span.to_json() for span in node.spans],
            },
        }
        if reasoning := [block.text for block in answer.blocks if isinstance(block, Reasoning)] if answer else []:
            step["reasoning_content"] = "\n".join(reasoning)
        if node.calls:
            step["tool_calls"] = [_call(call) for call in node.calls]
        if turn.is_owned:
            cached = {"cached_tokens": answer.cached_tokens} if answer else {}
            step["metrics"] = cached | {
                "prompt_tokens": turn.prompt.length,
                "completion_tokens": len(node.ids) + node.dropped,
                "prompt_token_ids": prompt_ids(turn),
                "completion_token_ids": list(node.ids),
                "logprobs": list(node.logprobs),
            }
        return step


def _call(call: ToolCall) -> dict[str, object]:
    """Return a call. Arguments that are not a JSON object are the text `arguments` of its `extra`."""
    try:
        arguments = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        arguments = None
    named: dict[str, object] = {"tool_call_id": call.id, "function_name": call.name}
    if isinstance(arguments, dict):
        return named | {"arguments": arguments}
    return named | {"arguments": {}, "extra": {"arguments": call.arguments}}
