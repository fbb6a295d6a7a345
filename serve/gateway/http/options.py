"""Options of `headrace serve gateway`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from headrace.serve.gateway.exports.export_form import ExportForm


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneOptions:
    """Options of the gateway. `place` is the number of a process among several."""

    engine: Annotated[str, Option(help="Base URLs of SGLang servers, separated by commas.")]
    tokenizer: Annotated[Path, Option(help="Directory with the tokenizer.json and chat template of the policy.")]
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = 0
    host: Annotated[str, Option(help="Address to bind.")] = "127.0.0.1"
    admin_token_file: Annotated[Path, Option(help="File with the admin token; created if missing.")] = Path(
        "gateway-admin-token"
    )
    engine_key_file: Annotated[
        Path | None, Option(help="Private file with the key of the engines; by default they have none.")
    ] = None
    advertise_url: Annotated[str | None, Option(help="Base URL given to agents on other hosts.")] = None
    state: Annotated[Path | None, Option(help="Folder for session logs; by default sessions are kept in memory.")] = (
        None
    )
    parser: Annotated[str, Option(help="Tool call parser: auto, hermes, qwen3_coder, none, sglang:NAME.")] = "auto"
    max_context_tokens: Annotated[
        int | None, Option(min=1, help="Context limit of a session; by default that of the engines.")
    ] = None
    export: Annotated[
        Path | None, Option(help="Folder to write each finished session to; by default none is written.")
    ] = None
    export_form: Annotated[ExportForm, Option(help="Form of the files in the --export folder.")] = ExportForm.ROWS
    processes: Annotated[
        int, Option(min=1, help="Number of processes, at most one for each core; each has a port of its own.")
    ] = 1
    place: int | None = None

    @property
    def engine_urls(self) -> tuple[str, ...]:
        return tuple(url.strip().rstrip("/") for url in self.engine.split(",") if url.strip())
