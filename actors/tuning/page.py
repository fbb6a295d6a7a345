"""The HTML page of a search, with picture, tables and the TOML to paste.

Invariants:
- The page is self-contained: style and picture are embedded.
- Text from recordings, paths and rules is escaped.
"""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING, Final

from headrace.actors.tuning.result import COLUMNS, cells

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.actors.tuning.result import TuningResult
    from headrace.actors.tuning.trial import Trial

STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #22303a; max-width: 1280px; margin: 2rem auto; padding: 0 1rem }
img { width: 100% } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e8edf0 }
th:nth-child(2), td:nth-child(2) { text-align: left } tr.chosen { background: #fdf1e0; font-weight: 600 }
tr.recorded { background: #e8edf0 } pre { background: #f4f7f9; padding: 1rem; overflow-x: auto }
"""

LEGEND: Final = (
    "<p>&gt; chosen, = recorded, * on the Pareto front. slow decile: share of the slowest tenth in what is trained, "
    "over a tenth. reward: mean reward trained less mean reward issued.</p>"
)


def page(tuned: TuningResult, png: bytes) -> str:
    """Return the page as HTML."""
    picture = base64.b64encode(png).decode()
    lines = "".join(f"<li>{escape(line)}</li>" for line in tuned.lines())
    failed = "".join(
        f"<li>{escape(failed.candidate.label())}: {escape(failed.reason)}</li>" for failed in tuned.searched.failed
    )
    sections = [
        f"<h1>headrace tune</h1><p>{escape(tuned.recording.source)}</p><ul>{lines}</ul>",
        f'<img alt="step time against staleness, waste and length bias" src="data:image/png;base64,{picture}">',
        f"<h2>To paste</h2><pre>{escape(tuned.toml())}</pre>",
        f"<h2>Settings</h2>{_table(tuned, tuned.finals())}",
        LEGEND,
        f"<h2>Screened with fewer steps</h2>{_table(tuned, tuned.searched.screened)}",
        f"<h2>Failed</h2><ul>{failed}</ul>" if failed else "",
    ]
    head = f'<meta charset="utf-8"><title>headrace tune</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(sections)}</body></html>\n'


def _table(tuned: TuningResult, trials: Sequence[Trial]) -> str:
    header = "".join(f"<th>{escape(name)}</th>" for name in ("", "setting", *COLUMNS))
    rows = []
    for trial in trials:
        mark = tuned.mark(trial)
        kind = {">": "chosen", "=": "recorded"}.get(mark, "")
        texts = "".join(f"<td>{escape(text)}</td>" for text in (mark, trial.candidate.label(), *cells(trial)))
        rows.append(f'<tr class="{kind}">{texts}</tr>')
    return f"<table><tr>{header}</tr>{''.join(rows)}</table>"
