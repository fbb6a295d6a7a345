"""Agents that are programs: what they are started with, and what is made of how they end."""

from __future__ import annotations

import json
import pickle
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from headrace.actors.agents.programs.agent import AgentReport, StopReason
from headrace.actors.agents.programs.claude_code import ClaudeCode, ClaudeCodeConfig
from headrace.actors.agents.programs.cli_agent import CliAgent, LaunchContext, OutputTail, ProgramConfig, target_of
from headrace.actors.agents.programs.codex import Codex, CodexConfig
from headrace.actors.agents.programs.installation import AgentMissing
from headrace.actors.agents.programs.mini_swe_agent import MiniMode, MiniSweAgent, MiniSweAgentConfig
from headrace.actors.agents.programs.opencode import Opencode
from headrace.actors.agents.programs.qwen_code import QwenCode
from headrace.actors.evaluation.graders.verdict import Verdict
from headrace.actors.rollouts.rollout import outcome_of
from headrace.buffer.trajectories.types import Cause
from headrace.sandboxes.base import HostPort, Stream
from headrace.serve.gateway.capture.events import Exhausted

KINDS: dict[str, Callable[[ProgramConfig], CliAgent]] = {
    "claude-code": lambda program: ClaudeCode(program, ClaudeCodeConfig()),
    "codex": lambda program: Codex(program, CodexConfig()),
    "mini-swe-agent": lambda program: MiniSweAgent(program, MiniSweAgentConfig()),
    "qwen-code": QwenCode,
    "opencode": Opencode,
}
PROMPT = '--fix "it" {now}\n/please'
PLACE = LaunchContext(
    folder="/opt/headrace/agents/x",
    home="/home/agent",
    url="http://127.0.0.1:47123/s/secret",
    token="secret",
    working_directory="/repo",
    prompt=PROMPT,
    context_tokens=30000,
)


def printed(*lines: object, max_bytes: int = 4096) -> OutputTail:
    out = OutputTail(max_bytes)
    for line in lines:
        out.add(Stream.STDOUT, (line if isinstance(line, str) else json.dumps(line)).encode() + b"\n")
    return out


@pytest.mark.parametrize("kind", KINDS)
def test_every_agent_is_launched_with_the_expected_command(kind: str, tmp_path: Path) -> None:
    agent = KINDS[kind](ProgramConfig(folder=tmp_path, arguments=("--more",), model='a "name"'))
    launch = agent.launch(PLACE)
    told = json.dumps([launch.command, dict(launch.environment), [text.decode() for text in launch.files.values()]])
    assert "127.0.0.1:47123/s/secret" in told
    assert PROMPT not in " ".join(launch.command), "it may be longer than an argument can be"
    assert "secret" not in " ".join(launch.command), "every user of the sandbox may read arguments"
    assert launch.files.get(launch.stdin) == (None if kind == "mini-swe-agent" else PROMPT.encode())
    assert "--more" in launch.command
    assert all(path.startswith("/home/agent/") for path in launch.files)
    [folder] = agent.folders
    assert (folder.source, folder.target) == (str(tmp_path), f"/opt/headrace/agents/{kind}")
    assert pickle.loads(pickle.dumps(agent)).launch(PLACE) == launch


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_in_the_image_needs_no_host_folder(kind: str) -> None:
    agent = KINDS[kind](ProgramConfig(in_image="/usr/local/bin/it"))
    assert agent.folders == ()
    assert agent.launch(PLACE).command[0] == "/usr/local/bin/it"


@pytest.mark.parametrize("kind", KINDS)
def test_an_agent_that_is_not_installed_is_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(AgentMissing, match=f"python -m .*installation {kind}"):
        KINDS[kind](ProgramConfig())


def test_claude_code_gets_its_settings(tmp_path: Path) -> None:
    launch = ClaudeCode(ProgramConfig(folder=tmp_path), ClaudeCodeConfig(bare=True)).launch(PLACE)
    assert launch.environment["ANTHROPIC_BASE_URL"] == PLACE.url
    assert launch.environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "30000"
    assert "IS_SANDBOX" in launch.setup
    assert "IS_SANDBOX" not in launch.environment, "only root needs it"
    assert launch.command[-1] == "--bare"


def test_codex_gets_its_settings(tmp_path: Path) -> None:
    launch = Codex(ProgramConfig(folder=tmp_path, model='a "b" \x7f'), CodexConfig(compact_at=0.5)).launch(PLACE)
    settings = tomllib.loads(launch.files["/home/agent/.codex/config.toml"].decode())
    assert settings["model"] == 'a "b" \x7f'
    assert (settings["model_context_window"], settings["model_auto_compact_token_limit"]) == (30000, 15000)
    provider = settings["model_providers"][settings["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == (f"{PLACE.url}/v1", "responses")
    assert launch.environment[provider["env_key"]] == "secret"


def test_opencode_gets_its_settings(tmp_path: Path) -> None:
    launch = Opencode(ProgramConfig(folder=tmp_path)).launch(PLACE)
    settings = json.loads(launch.files["/home/agent/.config/opencode/opencode.json"])
    provider, _, model = settings["model"].partition("/")
    assert settings["small_model"] == settings["model"]
    assert settings["provider"][provider]["options"] == {"baseURL": f"{PLACE.url}/v1", "apiKey": "secret"}
    assert settings["provider"][provider]["models"][model]["limit"]["context"] == 30000


def test_mini_swe_agent_gets_its_settings(tmp_path: Path) -> None:
    settings = MiniSweAgentConfig(mode=MiniMode.TEXT, command_timeout_s=7)
    launch = MiniSweAgent(ProgramConfig(folder=tmp_path), settings).launch(PLACE)
    told = json.loads(launch.files[launch.command[-1]])
    assert (told["mode"], told["task"], told["command_timeout_s"]) == ("text", PROMPT, 7)
    assert "secret" not in json.dumps(dict(launch.environment)), "commands of the policy inherit it"
    with pytest.raises(ValidationError):
        MiniSweAgentConfig.model_validate({"mode": "other"})


def test_a_prompt_without_the_instruction_is_refused() -> None:
    with pytest.raises(ValidationError, match="instruction"):
        ProgramConfig(prompt="do it")


CLAUDE_END = {"type": "result", "subtype": "success", "is_error": False, "num_turns": 5, "result": "done"}


@pytest.mark.parametrize(
    ("kind", "lines", "ending"),
    [
        ("claude-code", [{"type": "assistant"}, CLAUDE_END], ("done", 5, False)),
        (
            "claude-code",
            [CLAUDE_END | {"subtype": "error_during_execution", "is_error": True, "result": None}],
            ("error_during_execution", 5, True),
        ),
        ("claude-code", ["not json", {"type": "assistant"}], ("", 0, True)),
        ("qwen-code", [CLAUDE_END], ("done", 5, False)),
        (
            "codex",
            [
                {"type": "error", "message": "once"},
                {"type": "item.completed", "item": {"type": "agent_message", "text": "first"}},
                {"type": "item.completed", "item": {"type": "agent_message", "text": "last"}},
                {"type": "turn.completed"},
            ],
            ("last", 0, False),
        ),
        ("codex", [{"type": "turn.failed", "error": {"message": "no"}}], ("no", 0, True)),
        ("codex", [], ("", 0, True)),
        (
            "opencode",
            [{"type": "step_finish"}, {"type": "text", "part": {"text": "done"}}, {"type": "step_finish"}],
            ("done", 2, False),
        ),
        ("opencode", [{"type": "error", "error": {"name": "x"}}], ('{"name": "x"}', 0, True)),
        (
            "mini-swe-agent",
            [{"type": "result", "status": "Submitted", "result": "", "turns": 3}],
            ("Submitted", 3, False),
        ),
        (
            "mini-swe-agent",
            [{"type": "result", "status": "ContextWindowExceededError", "result": "long", "turns": 3}],
            ("long", 3, True),
        ),
    ],
)
def test_output_of_every_agent_is_parsed(
    kind: str,
    lines: list[object],
    ending: tuple[str, int, bool],
    tmp_path: Path,
) -> None:
    found = KINDS[kind](ProgramConfig(folder=tmp_path)).ending(printed(*lines))
    assert (found.result, found.turns, found.error) == ending


def test_only_the_tail_of_long_output_is_kept() -> None:
    out = printed(*({"n": number, "pad": "x" * 30} for number in range(100)), max_bytes=1024)
    out.add(Stream.STDERR, b"e" * 10_000)
    numbers = [event["n"] for event in out.events()]
    assert numbers[0] == 99
    assert 15 < len(numbers) < 30
    assert len(out.text()) < 1024 + 8192 + 64
    assert out.text().endswith("e" * 8192)


@pytest.mark.parametrize("kind", ["claude-code", "qwen-code"])
def test_a_result_too_long_to_keep_is_not_an_error(kind: str, tmp_path: Path) -> None:
    ending = KINDS[kind](ProgramConfig(folder=tmp_path)).ending
    assert not ending(printed({"type": "system"}, {**CLAUDE_END, "result": "x" * 5000})).error
    assert ending(printed({"type": "system"})).error


@pytest.mark.parametrize("line", ["[" * 100_000, "[1]", "\x00", '{"a":', "null"])
def test_lines_that_are_not_events_are_ignored(line: str) -> None:
    assert list(printed({"a": 1}, line, max_bytes=1 << 20).events()) == [{"a": 1}]


def test_session_urls_are_parsed() -> None:
    assert target_of("http://127.0.0.1:80/s/a-b_c/") == (HostPort(host="127.0.0.1", port=80), "/s/a-b_c")
    for url in ("https://h/s/x", "http://h:1", "http://h:1/", "", "/s/x"):
        with pytest.raises(ValueError, match="base URL"):
            target_of(url)


SOLVED = Verdict(reward=1.0, solved=True, cause=Cause.SOLVED)


@pytest.mark.parametrize(
    ("stop", "exhausted", "verdict", "cause"),
    [
        (StopReason.FINISHED, Exhausted.NONE, SOLVED, Cause.SOLVED),
        (StopReason.FINISHED, Exhausted.CONTEXT, SOLVED, Cause.SOLVED),
        (StopReason.FINISHED, Exhausted.TURNS, SOLVED, Cause.BUDGET),
        (StopReason.ERROR, Exhausted.NONE, SOLVED, Cause.SOLVED),
        (StopReason.ERROR, Exhausted.CONTEXT, SOLVED, Cause.BUDGET),
        (StopReason.TIME, Exhausted.NONE, SOLVED, Cause.BUDGET),
        (StopReason.TIME, Exhausted.NONE, Verdict(reward=0.0, cause=Cause.INVALID), Cause.INVALID),
    ],
)
def test_the_outcome_follows_from_stop_reason_and_verdict(
    stop: StopReason, exhausted: Exhausted, verdict: Verdict, cause: Cause
) -> None:
    outcome = outcome_of(AgentReport(stop=stop, turns=1), exhausted, verdict)
    assert (outcome.reward, outcome.trainable, outcome.cause) == (verdict.reward, True, cause)
