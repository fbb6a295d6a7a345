"""Entry point of `python -m headrace.policies.cpu_engine --model DIR`."""

from __future__ import annotations

import logging
import os

from headrace.policies.cpu_engine.program import main

if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # A transfer thread may hang in a collective, which cannot be cancelled: exit without waiting for it.
    os._exit(code)
