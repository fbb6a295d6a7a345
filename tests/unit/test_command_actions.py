"""Commands of actions, and the observations that environments write for them."""

from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError

from headrace.actors.environments.command_actions import (
    ECHO_WARNINGS,
    ECHOED,
    RETURN_CODE,
    SUCCEEDED,
    ActionRefused,
    CommandConfig,
    command_of,
    command_tools,
)
from headrace.actors.environments.environment import Action, PartKind, observed
from headrace.actors.environments.shell import ENDS_WITH_EXIT, SUBMITS, OutputForm, ShellConfig, shortened
from headrace.actors.environments.terminal import TerminalConfig, TerminalEnvironment


@pytest.mark.parametrize(
    ("template", "exit_code", "text"),
    [
        ("{output}", 0, "a {b}"),
        (RETURN_CODE, 3, "<returncode>3</returncode>\n<output>\na {b}\n</output>"),
        (SUCCEEDED, 0, "Command succeeded. Output:\na {b}\n\n(exit_code=0)"),
        (ECHOED, 7, "$ echo {x}\nCommand failed. Output:\na {b}\n\n(exit_code=7)"),
    ],
)
def test_the_template_decides_the_form_of_an_observation(template: str, exit_code: int, text: str) -> None:
    assert CommandConfig(observation=template).observe("echo {x}", "a {b}", exit_code) == text


@pytest.mark.parametrize(
    "template", ["{nothing}", "{output", "{output.__class__}", "{0}", "{}", "{output[0]}", "{output:d}"]
)
def test_templates_with_other_fields_are_refused(template: str) -> None:
    for name in ("observation", "timeout_observation"):
        with pytest.raises(ValidationError, match=name):
            CommandConfig(**{name: template})


def test_warnings_stand_before_the_observation_and_have_their_kind() -> None:
    config = CommandConfig(warnings=ECHO_WARNINGS, max_timeout_s=60.0)
    action = Action(
        name="bash", arguments={"command": "ls", "timeout": 900}, remarks=("only the first of 2 calls is run",)
    )
    command = command_of(action, config)
    assert command.timeout_s == 60.0
    seen = config.warn(command.remarks, observed("out", ends=True))
    warning = "WARNINGS:\n- only the first of 2 calls is run\n- timeout 900 is above 60; the command has 60 s\n\n"
    assert (seen.text, seen.ends) == (f"{warning}out", True)
    assert [part.kind for part in seen.parts] == [PartKind.WARNING, PartKind.OBSERVATION]
    assert seen.warnings == ((0, len(warning)),)
    assert config.warn((), observed("out")) == observed("out")
    assert CommandConfig().warn(command.remarks, observed("out")) == observed("out"), "not asked for"


def test_the_template_of_warnings_is_checked() -> None:
    with pytest.raises(ValidationError, match=r"unknown field \{output\}; the fields are warnings"):
        CommandConfig(warnings="{output}")


def test_an_unusable_pattern_is_refused() -> None:
    with pytest.raises(ValidationError, match="not a regular expression"):
        CommandConfig(ends="(")


@pytest.mark.parametrize(
    ("pattern", "command", "ends"),
    [
        ("", "exit", False),
        (ENDS_WITH_EXIT, "echo a; exit", True),
        (ENDS_WITH_EXIT, "exit 1", False),
        (ENDS_WITH_EXIT, "noexit", False),
        (SUBMITS, f"echo {SUBMITS} && cat patch", True),
    ],
)
def test_a_command_that_matches_the_pattern_ends_the_episode(pattern: str, command: str, *, ends: bool) -> None:
    assert CommandConfig(ends=pattern).ends_episode(command) is ends


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "needs a command"),
        ({"command": " \n"}, "needs a command"),
        ({"command": ["ls"]}, "needs a command"),
        ({"command": "a\0b"}, "null character"),
        ({"command": "echo \ud800"}, "not valid Unicode"),
        ({"command": "ls", "cwd": "/"}, "unknown argument 'cwd'"),
        ({"command": "ls", "timeout": True}, "timeout must be"),
        ({"command": "ls", "timeout": 0}, "timeout must be"),
        ({"command": "ls", "timeout": float("nan")}, "timeout must be"),
        ({"command": "ls", "timeout": "5"}, "timeout must be"),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason_for_the_policy(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ActionRefused, match=said):
        command_of(Action(name="bash", arguments=arguments), CommandConfig())


def test_only_bash_has_a_timeout_and_it_is_bounded() -> None:
    config = CommandConfig(command_timeout_s=10, max_timeout_s=60)
    assert command_of(Action(name="run", arguments={"command": "ls"}), config).timeout_s == 10
    assert command_of(Action(name="bash", arguments={"command": "ls", "timeout": 30}), config).timeout_s == 30
    assert command_of(Action(name="bash", arguments={"command": "ls", "timeout": 1e9}), config).timeout_s == 60
    with pytest.raises(ActionRefused, match="unknown argument 'timeout'"):
        command_of(Action(name="run", arguments={"command": "ls", "timeout": 5}), config)
    with pytest.raises(ActionRefused, match="unknown action 'search'"):
        command_of(Action(name="search", arguments={"command": "ls"}), config)


def test_environments_offer_their_tools_and_can_be_pickled() -> None:
    assert [tool.name for tool in command_tools(ShellConfig())] == ["bash", "done"]
    environment = pickle.loads(pickle.dumps(TerminalEnvironment(TerminalConfig(user="agent"))))
    assert (environment.needs_sandbox, environment.services) == (True, ())
    assert environment.actions == {"run", "bash", "done"}


@pytest.mark.parametrize(
    ("output", "form", "text"),
    [
        (b"0123456789\n\n", OutputForm.HEAD, "0123456789"),
        (b"0123456789ABC", OutputForm.HEAD, "0123456789"),
        (b"0123456789", OutputForm.HEAD_TAIL, "0123456789"),
        (b"01234" + b"x" * 90 + b"56789", OutputForm.HEAD_TAIL, "01234\n[90 bytes left out]\n56789"),
        ("aaaaé".encode() + b"x" * 90, OutputForm.HEAD, "aaaaéxxxx"),
        ("aaaaaaaaaé".encode(), OutputForm.HEAD, "aaaaaaaaa\ufffd"),
    ],
)
def test_long_outputs_are_shortened(output: bytes, form: OutputForm, text: str) -> None:
    assert shortened(output, 10, form) == text


def test_a_single_byte_of_a_long_output_is_its_first() -> None:
    assert shortened(b"abc", 1, OutputForm.HEAD_TAIL) == "a\n[2 bytes left out]\n"
