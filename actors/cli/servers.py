"""The commands `headrace retriever serve` and `headrace observe`, which serve something over HTTP in the foreground."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.actors.cli.output import AddressFile, Host, IdleSeconds, KeyFile, Port

__all__ = ["observe", "retriever_app"]

retriever_app = typer.Typer(no_args_is_help=True, help="Serve retrievers to environments with a search action.")


@retriever_app.command()
def serve(
    corpus: Annotated[Path, typer.Option(help='JSONL file of passages: {"id", "contents"}.')],
    host: Host = "127.0.0.1",
    port: Port = 0,
    address_file: AddressFile = None,
    idle_s: IdleSeconds = 1800.0,
    key_file: KeyFile = None,
    parent_pid: Annotated[
        int | None, typer.Option(help="Parent process; if it dies before the corpus is indexed, so does the retriever.")
    ] = None,
) -> None:
    """Serve a corpus by BM25: POST /retrieve {queries, topk, return_scores}, as retrievers of Search-R1. Prints the
    URL once the corpus is indexed; stops on SIGTERM or SIGINT."""
    from headrace.actors.services.local_server import ListenOptions
    from headrace.actors.services.retriever_server import serve_retriever

    options = ListenOptions(
        host=host, port=port, address_file=address_file, idle_s=idle_s, key_file=key_file, parent_pid=parent_pid
    )
    serve_retriever(corpus, options, typer.echo)


def observe(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    host: Host = "127.0.0.1",
    port: Port = 0,
    key_file: KeyFile = None,
    address_file: AddressFile = None,
) -> None:
    """Serve the page of a run: what it does, which rollouts were slow and why, each rollout with its text. It reads the
    run directory only, so the run may be going on, over, killed, or a copy. Prints the URL with the token that the page
    needs (without it if --key-file has one); stops on SIGTERM or SIGINT."""
    import asyncio

    from headrace.actors.telemetry.page.server import ObserveOptions
    from headrace.actors.telemetry.page.server import observe as serve_page

    options = ObserveOptions(host=host, port=port, key_file=key_file, address_file=address_file)
    asyncio.run(serve_page(run_dir, options, typer.echo))
