"""A collector of traces over HTTP in a process of its own, which a bench can stop (SIGSTOP): its port still takes
connections, and nothing answers."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Takes(BaseHTTPRequestHandler):
    """Takes everything, and answers with an empty ExportTraceServiceResponse."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def collector(*, stopped: bool) -> Iterator[str]:
    """Run a collector, which is stopped or running; yield its URL."""
    command = [sys.executable, "-m", "benches.tracing.collector"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            if stopped:
                process.send_signal(signal.SIGSTOP)
            yield url
        finally:
            process.kill()


def main() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Takes) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/v1/traces", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
