"""Check the summary that `scripts/quickstart --json FILE` wrote: the policy learned and nothing was lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

LEAST_SUCCESS = 0.85
"""Runs end above 0.9 (docs/measured.md); a run that never learned one of the four kinds would end near 0.75."""
LEAST_GAIN = 2.0


def problems(summary: dict[str, object]) -> list[str]:
    """What is wrong with the run, one sentence each."""
    base, final = (float(str(summary[key] or 0)) for key in ("base_success", "final_success"))
    found = []
    if final < LEAST_SUCCESS or final < LEAST_GAIN * base:
        found.append(
            f"held-out success {base:.3f} -> {final:.3f}: want {LEAST_SUCCESS} and {LEAST_GAIN} times the base"
        )
    if not (summary["completed"] and summary["ledger_clean"]):
        found.append(f"completed {summary['completed']}, ledger_clean {summary['ledger_clean']}")
    counts = {key: summary[key] for key in ("lost", "trained_twice", "sandboxes_leaked")}
    if any(counts.values()):
        found.append(f"expected 0 of each: {counts}")
    return found


if __name__ == "__main__":
    if found := problems(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))):
        sys.exit("quickstart: " + "; ".join(found))
