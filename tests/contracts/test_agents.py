"""Live agents in local sandboxes without network, before the real gateway and a scripted engine: no token is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from headrace.actors.agents.agent import StopReason
from headrace.actors.agents.claude_code import ClaudeCode, ClaudeCodeConfig
from headrace.actors.agents.cli_agent import ProgramConfig
from headrace.actors.agents.codex import Codex, CodexConfig
from headrace.actors.agents.mini_swe_agent import MiniMode, MiniSweAgent, MiniSweAgentConfig
from headrace.actors.agents.opencode import Opencode
from headrace.actors.agents.qwen_code import QwenCode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

pytestmark = [pytest.mark.agents, pytest.mark.namespaces]


@pytest.fixture(scope="module", name="rigs")
def load_rigs(load_support: Callable[[str], ModuleType]) -> Any:
    return load_support("agent_rig")


@pytest.fixture(scope="module")
def tokenizer_dir(rigs: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    rigs.write_tokenizer(folder)
    return folder


def check_whole(rigs: Any, ran: Any, engine: Any, *, rows: int) -> None:
    """Nothing failed, nothing is masked, and there is a row for every true lineage."""
    assert ran.session.failures == (), ran.agent.log_tail[-2000:]
    rigs.scripted.check_exact(ran.session, [engine])
    assert ran.session.masked == {}
    assert len(ran.session.trajectory.rows) == rows, ran.session.lineages
    assert ran.session.lost_calls == 0
    assert (ran.agent.stop, ran.agent.exit_code) == (StopReason.FINISHED, 0), ran.agent.log_tail[-2000:]


MAIN, SUB = "MAIN-TASK", "SUB-TASK"


async def test_claude_code(rigs: Any, tokenizer_dir: Path) -> None:
    """Its echoes are not what it was served: defaults added, keys and blocks moved, blanks and `cd` gone."""
    rigs.needs("claude-code")
    call = rigs.call
    edit = {"new_string": "    return a + b   ", "old_string": "    return a - b", "file_path": "/workspace/calc.py"}
    script = rigs.scripted.Parts(
        {
            MAIN: [
                call("Read", file_path="/workspace/calc.py") + "\nThat is what I look at.",
                call("Edit", **edit),
                call("Write", content="done   \n", file_path="/workspace/notes.txt"),
                call("Bash", timeout="5000", description="test", command="cd /workspace && python3 -B -m unittest"),
                call("Agent", description="one", prompt=f"{SUB} one", subagent_type="general-purpose")
                + call("Agent", description="two", prompt=f"{SUB} two", subagent_type="Explore"),
                "It is mended.",
            ],
            f"{SUB} one": [call("Bash", command="cd /workspace && ls", description="look"), "Four files."],
            f"{SUB} two": ["Nothing to see."],
        }
    )
    async with rigs.open_rig(tokenizer_dir, script) as rig:
        ran = await rig.run(ClaudeCode(ProgramConfig(), ClaudeCodeConfig()))
        await ran.check_fixed()
        assert await ran.out("cat notes.txt") == "done"
        check_whole(rigs, ran, rig.engine, rows=3)
        assert script.played() == {MAIN: 6, f"{SUB} one": 2, f"{SUB} two": 1}
        assert ran.agent.result == "It is mended."
        assert ran.session.drift["arguments"] >= 3
        await ran.check_quiet()


async def test_claude_code_compacts(rigs: Any, tokenizer_dir: Path) -> None:
    """By its own count when the window is nearly full, and by the gateway's refusal when a turn was too long for that;
    what it keeps of the history is not trained again."""
    rigs.needs("claude-code")

    def floods(characters: int, number: int) -> str:
        words = f"print('line {number} of much text ' * {characters // 23})"
        return str(rigs.call("Bash", command=f'python3 -c "{words}"', description="much"))

    for characters, window in ((12_000, 90_000), (20_000, 60_000)):
        script = rigs.scripted.Parts(
            {
                "CRITICAL: Respond with TEXT ONLY": ["<analysis>a</analysis><summary>THE-SUMMARY</summary>"],
                "THE-SUMMARY": [rigs.call("Bash", command="sed -i s/-/+/ calc.py", description="mend"), "Mended."],
                "": [floods(characters, number) for number in range(12)],
            }
        )
        async with rigs.open_rig(tokenizer_dir, script) as rig:
            ran = await rig.run(ClaudeCode(ProgramConfig(), ClaudeCodeConfig()), max_context_tokens=window)
            await ran.check_fixed()
            summaries = script.played()["CRITICAL: Respond with TEXT ONLY"]
            assert summaries >= 1
            # The history, each summary beside it, and what follows each.
            check_whole(rigs, ran, rig.engine, rows=1 + 2 * summaries)
            assert all(len(answer.prompt_ids) < window for answer in rig.engine.sampled)


async def test_claude_code_bare(rigs: Any, tokenizer_dir: Path) -> None:
    rigs.needs("claude-code")
    call = rigs.call
    script = rigs.scripted.Parts(
        {
            "": [
                call("Read", file_path="/workspace/calc.py"),
                call("Edit", file_path="/workspace/calc.py", old_string="a - b", new_string="a + b"),
                call("Bash", command="python3 -B -m unittest", description="test"),
                "It is mended.",
            ]
        }
    )
    async with rigs.open_rig(tokenizer_dir, script) as rig:
        ran = await rig.run(ClaudeCode(ProgramConfig(user="root"), ClaudeCodeConfig(bare=True)))
        await ran.check_fixed()
        check_whole(rigs, ran, rig.engine, rows=1)
        assert script.played() == {"": 4}
        await ran.check_quiet()


async def test_codex(rigs: Any, tokenizer_dir: Path) -> None:
    rigs.needs("codex")
    call = rigs.call
    patch = """apply_patch <<'EOF'
*** Begin Patch
*** Update File: calc.py
@@
 def add(a, b):
-    return a - b
+    return a + b
*** End Patch
EOF"""
    script = rigs.scripted.Parts(
        {
            "": [
                "I look first.\n" + call("exec_command", cmd="cat calc.py") + call("exec_command", cmd="ls"),
                call("exec_command", cmd=patch),
                call("exec_command", workdir="/workspace", cmd="python3 -B -m unittest"),
                "It is mended.",
            ]
        }
    )
    async with rigs.open_rig(tokenizer_dir, script) as rig:
        ran = await rig.run(Codex(ProgramConfig(), CodexConfig()))
        await ran.check_fixed()
        check_whole(rigs, ran, rig.engine, rows=1)
        assert script.played() == {"": 4}
        assert ran.agent.result == "It is mended."
        await ran.check_quiet()


@pytest.mark.parametrize("mode", list(MiniMode))
async def test_mini_swe_agent(rigs: Any, tokenizer_dir: Path, mode: MiniMode) -> None:
    rigs.needs("mini-swe-agent")

    def says(command: str) -> str:
        if mode is MiniMode.TOOL:
            return "So be it.\n" + str(rigs.call("bash", command=command))
        return f"THOUGHT: so be it.\n\n```mswea_bash_command\n{command}\n```"

    script = rigs.scripted.Parts(
        {
            "": [
                says("cat calc.py"),
                says("sed -i s/a.-.b/a+b/ calc.py && python3 -B -m unittest"),
                says("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
            ]
        }
    )
    async with rigs.open_rig(tokenizer_dir, script) as rig:
        ran = await rig.run(MiniSweAgent(ProgramConfig(), MiniSweAgentConfig(mode=mode)))
        await ran.check_fixed()
        check_whole(rigs, ran, rig.engine, rows=1)
        assert script.played() == {"": 3}
        assert (ran.agent.result, ran.agent.turns) == ("Submitted", 3)
        await ran.check_quiet()


@pytest.mark.slow
async def test_qwen_code(rigs: Any, tokenizer_dir: Path) -> None:
    rigs.needs("qwen-code")
    call = rigs.call
    script = rigs.scripted.Parts(
        {
            "": [
                "I look. " + call("read_file", file_path="/workspace/calc.py"),
                call("edit", new_string="a + b", old_string="a - b", file_path="/workspace/calc.py"),
                call("run_shell_command", command="python3 -B -m unittest", is_background=False),
                "It is mended.",
            ]
        }
    )
    async with rigs.open_rig(tokenizer_dir, script) as rig:
        ran = await rig.run(QwenCode(ProgramConfig()))
        await ran.check_fixed()
        check_whole(rigs, ran, rig.engine, rows=1)
        assert script.played() == {"": 4}
        assert ran.agent.result == "It is mended."
        await ran.check_quiet()


@pytest.mark.slow
async def test_opencode(rigs: Any, tokenizer_dir: Path) -> None:
    """Its call for a title is a lineage of its own, and masked."""
    rigs.needs("opencode")
    call = rigs.call
    script = rigs.scripted.Parts(
        {
            "title generator": ["Mending add"],
            "": [
                "I look. " + call("read", filePath="/workspace/calc.py"),
                call("edit", newString="a + b", oldString="a - b", filePath="/workspace/calc.py"),
                call("bash", command="python3 -B -m unittest", description="tëst"),
                "It is mended.",
            ],
        }
    )
    async with rigs.open_rig(tokenizer_dir, script) as rig:
        ran = await rig.run(Opencode(ProgramConfig()))
        await ran.check_fixed()
        assert ran.session.failures == ()
        rigs.scripted.check_exact(ran.session, [rig.engine])
        assert script.played() == {"title generator": 1, "": 4}
        [title] = [answer for answer in rig.engine.sampled if answer.text == "Mending add"]
        assert ran.session.masked == {"side": len(title.output_ids)}
        assert len(ran.session.trajectory.rows) == 1
        assert ran.agent.result == "It is mended."
        await ran.check_quiet()
