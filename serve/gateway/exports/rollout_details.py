"""Harbor's RolloutDetail: for each row the ids of its turns, as they were sent to the engine and sampled.

Invariants:
- There is one RolloutDetail for each row, that of the main conversation first, and each turn of the rows is in exactly
  one: if several rows begin with the same turns, only the first one lists them.
- In a RolloutDetail, the prompt of a turn starts with the prompt plus the completion of the turn before.
- Turns that are in no row (cut, abandoned, of side calls) are left out. Masked turns of rows are marked in `extra`.

Format: harbor.models.agent.rollout_detail of Harbor 0.25.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.serve.gateway.capture.session import Session
from headrace.serve.gateway.capture.trie import Trie
from headrace.serve.gateway.exports import json_pieces
from headrace.serve.gateway.exports.branches import Branch, BranchTurn, branches_of


def rollout_details(session: Session) -> Iterator[bytes]:
    """Yield the pieces of the JSON list of a session's RolloutDetails; it is empty if nothing was sampled."""
    rows = (
        (branch, [turn for turn in branch.turns if turn.is_owned and turn.is_in_row]) for branch in branches_of(session)
    )
    return json_pieces.array(detail_pieces(branch, turns) for branch, turns in rows if turns)


def detail_pieces(branch: Branch, turns: list[BranchTurn]) -> Iterator[bytes]:
    """Yield the pieces of the RolloutDetail of a branch with these turns."""
    extra = {
        "turn_id": [turn.sampled.turn_id for turn in turns],
        "lineage": [branch.lineage for _ in turns],
        "masked": [turn.masked for turn in turns],
        "loss_mask": [[int(turn.masked is None)] * len(turn.sampled.ids) for turn in turns],
        "versions": [[span.to_json() for span in turn.sampled.spans] for turn in turns],
    }
    return json_pieces.document(
        (
            # Each prompt is a piece of its own: together they have the square of the conversation's length.
            ("prompt_token_ids", json_pieces.array(json_pieces.value(prompt_ids(turn)) for turn in turns)),
            ("completion_token_ids", json_pieces.value([list(turn.sampled.ids) for turn in turns])),
            ("logprobs", json_pieces.value([list(turn.sampled.logprobs) for turn in turns])),
            ("extra", json_pieces.value(extra)),
        )
    )


def prompt_ids(turn: BranchTurn) -> list[int]:
    """Return the ids that the engine received for a turn."""
    return list(Trie.path_ids(turn.sampled)[: turn.prompt.length])
