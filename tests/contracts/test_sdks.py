"""SDKs for Python and Node against the gateway: each runs as a program of its own, checks what it is served, and prints
the result of each check. `scripts/install sdks` installs them at pinned versions."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from headrace.serve.gateway.capture.session import Budgets
from support.gateway_rig import World, call_text, until, world
from support.installed_programs import installed
from support.scripted_engine import Ask, Fault, check_exact

SDKS = Path(__file__).with_name("sdks")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
INSTALL_S, RUN_S = 600, 240
ATTEMPTS = 2
"""Requests of the gateway to its engines before a failure reaches the client."""
CALL, OTHER = call_text("add", a=1, b=2), call_text("add", a=3, b=4)
SAYS: dict[str, str | Fault] = {
    "[hello]": "Hello there.",
    "[call]": CALL,
    "[two calls]": f"{CALL}\n{OTHER}",
    "[think and call]": f"<think>\nI should add.\n</think>\n\n{CALL}",
    "[sum]": "The sum is 3.",
    "[sum call]": call_text("Sum", total=3),
    "[sum json]": '{"total": 3}',
    "[stop]": "before END after",
    "[hang]": Fault.HANG,
    "[down]": Fault.ERROR,
    "[down once]": "It is up.",
}
OPENAI = [
    "chat_whole",
    "chat_streamed_with_usage",
    "chat_tool_round_trip",
    "chat_parallel_calls",
    "chat_stream_helper",
    "chat_three_choices",
    "chat_stop_strings",
    "chat_max_tokens",
    "chat_required_call",
    "chat_logprobs_and_token_ids",
    "models",
    "context_exceeded",
    "closed_session",
    "too_many_requests",
    "retried_after_503",
    "timeout_ends_the_turn",
    "aborted_stream_ends_the_turn",
    "responses_whole",
    "responses_call_round_trip",
    "responses_streamed",
    "responses_input_tokens",
    "responses_retried_after_503",
]
ANTHROPIC = [
    "messages_whole",
    "messages_streamed",
    "stream_helper_text",
    "stream_helper_thinking_and_tool_round_trip",
    "tool_round_trip",
    "forced_call",
    "count_tokens",
    "models",
    "prompt_too_long",
    "closed_session",
    "overloaded_without_retry",
    "retried_after_529",
    "stop_sequences",
    "max_tokens",
    "aborted_stream_ends_the_turn",
]
LITELLM = [
    "whole",
    "asynchronous",
    "streamed",
    "tool_round_trip",
    "streamed_calls",
    "context_exceeded",
    "closed_session",
]
LANGCHAIN = ["invoke", "stream", "tool_round_trip", "structured_by_call", "structured_by_schema"]
CHECKS = {
    "openai_checks.py": OPENAI,
    "openai_checks.mjs": OPENAI,
    "anthropic_checks.py": ANTHROPIC,
    "anthropic_checks.mjs": ANTHROPIC,
    "litellm_checks.py": [f"{api}_{name}" for name in LITELLM for api in ("openai", "anthropic")],
    "langchain_checks.py": [f"{api}_{name}" for name in LANGCHAIN for api in ("openai", "responses", "anthropic")],
}
BUDGETS = Budgets(max_context_tokens=4096, max_turns=1000)
HUNG_TURNS = {"openai_checks": 66, "anthropic_checks": 1}
"""Turns that the client leaves: 64 at once, one by its timeout, and one by closing the stream."""
FAILED_TURNS = {"openai_checks": 2, "anthropic_checks": 2}
"""Failures that reach the client: those of `[down]` and `[down once]`."""


class Answers:
    """Script of an engine: the last mark of the prompt decides. `[down once]` fails until the client has seen it."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def __call__(self, ask: Ask) -> str | Fault:
        mark = [one for one in re.findall(r"\[[a-z ]+\]", ask.prompt) if one in SAYS][-1]
        self.asked[mark] += 1
        if mark == "[down once]" and self.asked[mark] % (ATTEMPTS + 1):
            return Fault.ERROR
        return SAYS[mark]


@pytest.fixture(scope="module")
def sdks() -> Path:
    """Folder of the SDKs, installed into the user's cache if necessary."""
    return installed("sdks", timeout_s=INSTALL_S)


async def results_of(program: str, sdks: Path, home: Path, urls: dict[str, str]) -> dict[str, str | None]:
    """Run the program with nothing but the URLs; return the error of each check, or None."""
    if program.endswith(".py"):
        command, path = [str(sdks / "python" / "bin" / "python"), str(SDKS / program)], "/usr/bin:/bin"
    else:
        # Node finds packages above the program's own folder only.
        for name in ("checks.mjs", program):
            shutil.copy(SDKS / name, home)
        (home / "node_modules").symlink_to(sdks / "node" / "node_modules")
        command, path = ["node", str(home / program)], os.environ["PATH"]
    environment = {"PATH": path, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"} | urls
    ran = await asyncio.create_subprocess_exec(
        *command,
        env=environment | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        cwd=home,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(RUN_S):
            out, errors = await ran.communicate()
    finally:
        if ran.returncode is None:
            ran.kill()
            await ran.wait()
    assert ran.returncode == 0, errors.decode()
    lines = [json.loads(line) for line in out.decode().splitlines() if line.startswith('{"check"')]
    return {line["check"]: line["error"] for line in lines}


def check_engine(program: str, answers: Answers, w: World) -> None:
    """Check what only the engine knows: a retry is sampled once, and demands arrive as grammars."""
    [engine] = w.engines
    hung = [one for one in engine.sampled if one.prompt.rfind("[hang]") > one.prompt.rfind("|im_start|>system")]
    assert len(hung) == answers.asked["[hang]"] == HUNG_TURNS.get(program.partition(".")[0], 0), "each was aborted"
    up = sum("[down once]" in one.prompt for one in engine.sampled)
    assert answers.asked["[down once]"] == (ATTEMPTS + 1) * up, "each retry was sampled once"
    tags = {mark: [] for mark in ("[sum call]", "[sum json]", "[call]")}
    for body in engine.requests:
        prompt = engine.tokenizer.decode(body["input_ids"], skip_special_tokens=False)
        for mark, found in tags.items():
            if prompt.rfind(mark) >= 0 and "structural_tag" in body["sampling_params"]:
                found.append(body["sampling_params"]["structural_tag"])
    if program.startswith("langchain"):
        assert [len(tags["[sum call]"]), len(tags["[sum json]"])] == [3, 3]
        assert all('"total"' in tag for tag in tags["[sum call]"] + tags["[sum json]"])
        assert all('{\\"name\\": \\"Sum\\"' in tag for tag in tags["[sum call]"])
    elif not program.startswith("litellm"):
        [tag] = tags["[call]"]
        assert '{\\"name\\": \\"add\\"' in tag


@pytest.mark.parametrize("program", CHECKS)
async def test_an_sdk_is_served_as_by_its_provider(program: str, sdks: Path, model_dir: Path, tmp_path: Path) -> None:
    answers = Answers()
    # Streams get their head with the first ping, so that a client can leave a turn that hangs.
    async with world(model_dir, answers, ping_s=0.2) as w:
        closed = await w.open("closed")
        await w.finish("closed")
        urls = {"BASE_URL": await w.open(budgets=BUDGETS), "CLOSED_URL": closed}
        results = await results_of(program, sdks, tmp_path, urls)
        for name, error in results.items():
            print(f"{program:22} {name:45} {'failed' if error else 'passed'}")
        failed = {name: error for name, error in results.items() if error}
        assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())
        assert list(results) == CHECKS[program]
        # What the client left ends on the engine before the session does.
        await until(lambda: w.engines[0].running == 0)
        check_engine(program, answers, w)
        report = await w.finish()
        check_exact(report, w.engines)
        assert len(report.failures) == FAILED_TURNS.get(program.partition(".")[0], 0)
