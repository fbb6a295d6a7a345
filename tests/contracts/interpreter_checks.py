"""Drives the unmodified Python package of the code interpreter; fails at the first difference."""

import base64

from e2b import NotFoundException, SandboxException, TimeoutException
from e2b_code_interpreter import Sandbox

sandbox = Sandbox.create(timeout=180)
assert sandbox.run_code("x = 1; x + 1").text == "2"
assert sandbox.run_code("x").text == "1"

lines: list[str] = []
code = "import sys\nprint('out', flush=True)\nprint('err', file=sys.stderr)\n'text'"
streamed = sandbox.run_code(
    code, on_stdout=lambda one: lines.append(one.line), on_stderr=lambda one: lines.append(one.line)
)
assert (sorted(lines), streamed.text) == (["err\n", "out\n"], "text")
assert (streamed.logs.stdout, streamed.logs.stderr) == (["out\n"], ["err\n"])

error = sandbox.run_code("1/0").error
assert error is not None
assert (error.name, error.value) == ("ZeroDivisionError", "division by zero")
assert "ZeroDivisionError" in error.traceback

drawn = sandbox.run_code("import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()").results[0]
assert base64.b64decode(drawn.png or "")[1:4] == b"PNG"
assert "<table" in (sandbox.run_code("import pandas as pd\npd.DataFrame({'a': [1]})").results[0].html or "")

assert sandbox.run_code("import os; os.environ['A']", envs={"A": "b"}).text == "b"
assert sandbox.run_code("os.environ.get('A', 'none')").text == "none"

context = sandbox.create_code_context(cwd="/tmp")
assert sandbox.run_code("import os; os.getcwd()", context=context).text == "/tmp"
assert sandbox.run_code("x", context=context).error.name == "NameError"
assert len(sandbox.list_code_contexts()) == 2
sandbox.run_code("y = 1", context=context)
sandbox.restart_code_context(context)
assert sandbox.run_code("y", context=context).error.name == "NameError"
sandbox.remove_code_context(context)
for kind, words in ((NotFoundException, {"context": context}), (SandboxException, {"language": "r"})):
    try:
        sandbox.run_code("1", **words)
    except kind as refusal:
        assert "not found" in str(refusal) or "unsupported" in str(refusal)
    else:
        raise AssertionError(words)

# An execution whose client leaves is interrupted, and a kernel that dies is started again.
try:
    sandbox.run_code("import time; time.sleep(100)", timeout=1)
except TimeoutException:
    pass
else:
    raise AssertionError("no timeout")
assert sandbox.run_code("'fine'").text == "fine"
assert sandbox.run_code("import os; os._exit(1)").error.name == "KernelDied"
assert sandbox.run_code("2 + 2").text == "4"
sandbox.kill()
print("all passed")
