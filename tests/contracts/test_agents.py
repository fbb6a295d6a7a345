"""Live agents in local sandboxes without network, before the real gateway and a scripted engine: no token is lost."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.actors.agents.programs.agent import StopReason
from headrace.actors.agents.programs.claude_code import ClaudeCode, ClaudeCodeConfig
from headrace.actors.agents.programs.cli_agent import ProgramConfig
from headrace.actors.agents.programs.codex import Codex, CodexConfig
from headrace.actors.agents.programs.mini_swe_agent import MiniMode, MiniSweAgent, MiniSweAgentConfig
from headrace.actors.agents.programs.opencode import Opencode
from headrace.actors.agents.programs.qwen_code import QwenCode
from headrace.serve.gateway.capture.events import Exhausted
from support import agent_rig as rigs

pytestmark = [pytest.mark.whole, pytest.mark.agents, pytest.mark.namespaces]


@dataclass
class Model:
    """A policy that thinks first writes its thoughts where the generation prompt has opened them already."""

    folder: Path
    thinks: bool

    def lines(self, *lines: str) -> list[str]:
        return [f"Let me think.\n</think>\n\n{line}" for line in lines] if self.thinks else list(lines)


@pytest.fixture(params=["QWEN3", "QWEN3_THINKING"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Model:
    return Model(rigs.write_tokenizer(tmp_path / "model", request.param), thinks=request.param != "QWEN3")


def check_whole(ran: Any, engine: Any, *, rows: int) -> None:
    """Nothing failed, nothing is masked, and there is a row for every true lineage."""
    assert ran.session.failures == (), ran.agent.log_tail[-2000:]
    rigs.scripted.check_exact(ran.session, [engine])
    assert ran.session.masked == {}
    assert len(ran.session.trajectory.rows) == rows == rigs.scripted.lineages([engine]), ran.session.lineages
    assert ran.session.lost_calls == 0
    assert (ran.agent.stop, ran.agent.exit_code) == (StopReason.FINISHED, 0), ran.agent.log_tail[-2000:]


MAIN, SUB = "MAIN-TASK", "SUB-TASK"
SUMMARY_REQUEST = "CRITICAL: Respond with TEXT ONLY"


async def test_claude_code_loses_no_token_when_its_echoes_differ_from_what_it_was_served(tokenizer_dir: Path) -> None:
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
        check_whole(ran, rig.engine, rows=3)
        assert script.played() == {MAIN: 6, f"{SUB} one": 2, f"{SUB} two": 1}
        assert ran.agent.result == "It is mended."
        assert ran.session.drift["arguments"] >= 3
        await ran.check_quiet()


@pytest.mark.parametrize("refused", [False, True])
async def test_claude_code_compacts_and_retained_history_is_not_trained_again(
    tokenizer_dir: Path, *, refused: bool
) -> None:
    """By its own count when the window is nearly full, and by the gateway's refusal when a turn was too long for that;
    what it keeps of the history is not trained again."""
    rigs.needs("claude-code")
    flood = "line of much text " * 1000
    command = f"python3 -c \"print('{flood[:18]}' * {len(flood) // 18})\""
    mends = rigs.call("Bash", command="sed -i s/-/+/ calc.py", description="mend")
    script = rigs.scripted.Parts(
        {
            "Only say hello": ["Hello."],
            SUMMARY_REQUEST: ["<analysis>a</analysis><summary>THE-SUMMARY</summary>"],
            "THE-SUMMARY": [mends, "Mended."],
            "": [rigs.call("Bash", command=command, description=f"much {number}") for number in range(12)],
        }
    )
    async with rigs.open_rig(tokenizer_dir, script) as rig:
        blind = {"CLAUDE_CODE_AUTO_COMPACT_WINDOW": "1000000"} if refused else {}
        agent = ClaudeCode(ProgramConfig(environment=blind), ClaudeCodeConfig())
        await rig.run(agent, told=rigs.task("Only say hello"))
        [hello] = rig.engine.sampled
        turn = len(rig.engine.tokenizer.encode(flood).ids)
        rig.engine.sampled.clear()
        ran = await rig.run(agent, max_context_tokens=len(hello.prompt_ids) + int(4.5 * turn))
        await ran.check_fixed()
        summaries = script.played()[SUMMARY_REQUEST]
        assert summaries >= 1
        assert (ran.session.exhausted is Exhausted.CONTEXT) == refused
        # The history, each summary beside it, and what follows each.
        check_whole(ran, rig.engine, rows=1 + 2 * summaries)


async def test_claude_code_in_bare_mode_fixes_the_task(model: Model) -> None:
    rigs.needs("claude-code")
    call = rigs.call
    script = rigs.scripted.Parts(
        {
            "": model.lines(
                call("Read", file_path="/workspace/calc.py"),
                call("Edit", file_path="/workspace/calc.py", old_string="a - b", new_string="a + b"),
                call("Bash", command="python3 -B -m unittest", description="test"),
                "It is mended.",
            )
        }
    )
    async with rigs.open_rig(model.folder, script) as rig:
        ran = await rig.run(ClaudeCode(ProgramConfig(user="root"), ClaudeCodeConfig(bare=True)))
        await ran.check_fixed()
        check_whole(ran, rig.engine, rows=1)
        assert script.played() == {"": 4}
        await ran.check_quiet()


async def test_codex_fixes_the_task(model: Model) -> None:
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
            "": model.lines(
                "I look first.\n" + call("exec_command", cmd="cat calc.py") + call("exec_command", cmd="ls"),
                call("exec_command", cmd=patch),
                call("exec_command", workdir="/workspace", cmd="python3 -B -m unittest"),
                "It is mended.",
            )
        }
    )
    async with rigs.open_rig(model.folder, script) as rig:
        ran = await rig.run(Codex(ProgramConfig(), CodexConfig()))
        await ran.check_fixed()
        check_whole(ran, rig.engine, rows=1)
        assert script.played() == {"": 4}
        assert ran.agent.result == "It is mended."
        await ran.check_quiet()


@pytest.mark.slow(but_first=True)
@pytest.mark.parametrize("mode", list(MiniMode))
async def test_mini_swe_agent_fixes_the_task(model: Model, mode: MiniMode) -> None:
    rigs.needs("mini-swe-agent")

    def says(command: str) -> str:
        if mode is MiniMode.TOOL:
            return "So be it.\n" + str(rigs.call("bash", command=command))
        return f"THOUGHT: so be it.\n\n```mswea_bash_command\n{command}\n```"

    script = rigs.scripted.Parts(
        {
            "": model.lines(
                says("cat calc.py"),
                says("sed -i s/a.-.b/a+b/ calc.py && python3 -B -m unittest"),
                says("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
            )
        }
    )
    async with rigs.open_rig(model.folder, script) as rig:
        ran = await rig.run(MiniSweAgent(ProgramConfig(), MiniSweAgentConfig(mode=mode)))
        await ran.check_fixed()
        check_whole(ran, rig.engine, rows=1)
        assert script.played() == {"": 3}
        assert (ran.agent.result, ran.agent.turns) == ("Submitted", 3)
        await ran.check_quiet()


@pytest.mark.slow
async def test_qwen_code_fixes_the_task(model: Model) -> None:
    rigs.needs("qwen-code")
    call = rigs.call
    script = rigs.scripted.Parts(
        {
            "": model.lines(
                "I look. " + call("read_file", file_path="/workspace/calc.py"),
                call("edit", new_string="a + b", old_string="a - b", file_path="/workspace/calc.py"),
                call("run_shell_command", command="python3 -B -m unittest", is_background=False),
                "It is mended.",
            )
        }
    )
    async with rigs.open_rig(model.folder, script) as rig:
        ran = await rig.run(QwenCode(ProgramConfig()))
        await ran.check_fixed()
        check_whole(ran, rig.engine, rows=1)
        assert script.played() == {"": 4}
        assert ran.agent.result == "It is mended."
        await ran.check_quiet()


@pytest.mark.slow
async def test_opencode_fixes_the_task(model: Model) -> None:
    """Its call for a title is a lineage of its own, and masked."""
    rigs.needs("opencode")
    call = rigs.call
    script = rigs.scripted.Parts(
        {
            "title generator": model.lines("Mending add"),
            "": model.lines(
                "I look. " + call("read", filePath="/workspace/calc.py"),
                call("edit", newString="a + b", oldString="a - b", filePath="/workspace/calc.py"),
                call("bash", command="python3 -B -m unittest", description="tëst"),
                "It is mended.",
            ),
        }
    )
    async with rigs.open_rig(model.folder, script) as rig:
        ran = await rig.run(Opencode(ProgramConfig()))
        await ran.check_fixed()
        assert ran.session.failures == ()
        rigs.scripted.check_exact(ran.session, [rig.engine])
        assert script.played() == {"title generator": 1, "": 4}
        [title] = [answer for answer in rig.engine.sampled if answer.text.endswith("Mending add")]
        assert ran.session.masked == {"side": len(title.output_ids)}
        assert len(ran.session.trajectory.rows) == 1 == rigs.scripted.lineages([rig.engine]) - 1
        assert ran.agent.result == "It is mended."
        await ran.check_quiet()
