"""Changes of an SGLang server that a test starts with this folder on its path; see `support.lazy_backend`.

With LOCAL_CHECKPOINT it has the route /pull_weights of slime's SGLang, by slime's own module (from its patch), which
the variable names: the patch itself is for another commit of SGLang."""

import os
import sys
from pathlib import Path

from support.after_import import AfterImport


def _register(_: object) -> None:
    from support import lazy_backend

    lazy_backend.register()


def _queue_updates(updater: object) -> None:
    from support import lazy_backend

    lazy_backend.queue_updates(updater)


def _wait_in_checks(checker: object) -> None:
    from support import lazy_backend

    lazy_backend.wait_in_checks(checker)


def _serve_pulls(server: object) -> None:
    from support import slime_pulls

    slime_pulls.serve(server)


SGLANG = "sglang.srt.model_executor.model_runner_components"
sys.meta_path.insert(0, AfterImport("torch.distributed", _register))
if os.environ.get("HEADRACE_TEST_BACKEND") == "lazy":
    sys.meta_path.insert(0, AfterImport(f"{SGLANG}.weight_updater", _queue_updates))
    sys.meta_path.insert(0, AfterImport("sglang.srt.utils.weight_checker", _wait_in_checks))
if os.environ.get("HEADRACE_TEST_PULLS"):
    sys.meta_path.insert(0, AfterImport("sglang.srt.entrypoints.http_server", _serve_pulls))

# Python imports one module of this name: that of headrace's shims, for SGLang on a CPU, comes next on the path.
for folder in sys.path[sys.path.index(str(Path(__file__).parent)) + 1 :]:
    if (shim := Path(folder, "sitecustomize.py")).is_file():
        exec(compile(shim.read_text(), str(shim), "exec"))
        break
