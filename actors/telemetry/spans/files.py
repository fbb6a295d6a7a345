"""The spans of a run as files of other programs: Perfetto (and chrome://tracing), and Parquet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from headrace.buffer.audit.export import parquet_module

ROWS_AT_ONCE: Final = 10_000


def write_perfetto(path: Path, spans: Iterable[Mapping[str, Any]]) -> int:
    """Write spans as a trace in the Trace Event Format, which ui.perfetto.dev opens; return their number. Each process
    of the run is a process, and each trace a thread in it. Raises OSError."""
    processes: dict[str, int] = {}
    threads: dict[tuple[int, str], int] = {}
    number = 0
    with path.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for span in spans:
            name = f"{span['resource'].get('service.instance.id', '')} on {span['resource'].get('host.name', '')}"
            process = processes.setdefault(name, len(processes) + 1)
            thread = threads.setdefault((process, span["trace_id"]), len(threads) + 1)
            event = {
                "ph": "X",
                "name": span["name"],
                "pid": process,
                "tid": thread,
                "ts": span["start_ns"] / 1000,
                # A clock that was set back may have ended a span before its start.
                "dur": max(0, span["end_ns"] - span["start_ns"]) / 1000,
                "args": {"trace_id": span["trace_id"], "status": span["status"], **span["attributes"]},
            }
            file.write((b",\n" if number else b"\n") + orjson.dumps(event))
            number += 1
        for name, process in processes.items():
            event = {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
            file.write(b",\n" + orjson.dumps(event))
        file.write(b"\n]}\n")
    return number


def write_parquet(path: Path, spans: Iterable[Mapping[str, Any]]) -> int:
    """Write spans as one Parquet file with a row for each, in the columns of the guide 'Run directory'; return their
    number. Raises OSError, and ExportRefused without pyarrow."""
    parquet = parquet_module()
    import pyarrow as pa

    text, moment = pa.string(), pa.timestamp("ns", tz="UTC")
    fields = [("name", text), ("trace_id", text), ("span_id", text), ("parent_id", text), ("status", text)]
    fields += [("detail", text), ("start", moment), ("end", moment), ("seconds", pa.float64())]
    fields += [(name, text) for name in ("process", "host", "run", "attributes")]
    schema = pa.schema(fields)
    number, rows = 0, []
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        for span in spans:
            resource = span["resource"]
            rows.append(
                {
                    **{name: span[name] for name in ("name", "trace_id", "span_id", "parent_id", "status")},
                    "detail": span["detail"] or None,
                    "start": span["start_ns"],
                    "end": span["end_ns"],
                    "seconds": (span["end_ns"] - span["start_ns"]) / 1e9,
                    "process": resource.get("service.instance.id"),
                    "host": resource.get("host.name"),
                    "run": resource.get("headrace.run.id"),
                    "attributes": orjson.dumps(span["attributes"]).decode(),
                }
            )
            number += 1
            if len(rows) == ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()
        writer.write_table(pa.Table.from_pylist(rows, schema))
    return number
