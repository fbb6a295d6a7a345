"""Conversion of a Dockerfile to build steps.

The subset: one FROM, RUN (shell and exec form, here documents), COPY and ADD of files of the context (`--chown`,
`--chmod`), ENV, ARG, WORKDIR and USER; CMD and ENTRYPOINT become the start command. LABEL, EXPOSE, MAINTAINER,
STOPSIGNAL, HEALTHCHECK and SHELL with bash or sh change nothing.

Invariants: an instruction outside the subset is refused with its line. Variables of the base image and of ENV are
expanded by the builder; arguments of the build (ARG) are expanded here and, unlike Docker's, are no variables of RUN
unless a RUN follows them in the same Dockerfile, which then sees them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from e2b_dockerfile_utils import (
    DockerfileInstruction,
    ShellLex,
    chomp_heredoc_content,
    parse_dockerfile_ast,
    parse_heredoc,
)

from headrace.sandboxes.images.build_steps import BuildRefused, BuildStep, StepKind

_HARMLESS: Final = frozenset({"LABEL", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK"})
_SHELLS: Final = (["/bin/bash", "-c"], ["/bin/sh", "-c"], ["/bin/bash", "-o", "pipefail", "-c"])
_MODE: Final = re.compile(r"[0-7]{3,4}")
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://|git@", re.IGNORECASE)
_ARCHIVE: Final = re.compile(r"\.(tar|tgz|tbz2?|txz|tar\.(gz|bz2|xz|zst))$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    """A converted Dockerfile. COPY steps have no context yet (`build_context.store_files`)."""

    base: str
    steps: tuple[BuildStep, ...]
    start_command: str
    folder: str
    """Last WORKDIR that needs no variables, resolved; "" if there is none."""


def parse(text: str, arguments: Mapping[str, str] | None = None) -> Dockerfile:
    """Convert a Dockerfile; `arguments` are values for its ARGs. Raises BuildRefused, which names the line."""
    try:
        ast = parse_dockerfile_ast(text)
    except ValueError as error:
        raise BuildRefused(str(error), "base") from error
    conversion = _Conversion(ast.escape_token, dict(arguments or {}))
    for instruction in ast.instructions:
        try:
            conversion.add(instruction)
        except ValueError as error:
            raise BuildRefused(f"Dockerfile, line {instruction.start_line}: {error}", "base") from error
    if not conversion.base:
        raise BuildRefused("the Dockerfile has no FROM", "base")
    return Dockerfile(
        base=conversion.base,
        steps=tuple(conversion.steps),
        start_command=conversion.start_command(),
        folder=conversion.folder,
    )


class _Conversion:
    """One Dockerfile. Methods raise ValueError for what is outside the subset."""

    def __init__(self, escape: str, given: dict[str, str]) -> None:
        self.base = ""
        self.steps: list[BuildStep] = []
        self.folder = ""
        self._given = given
        self._arguments: dict[str, str] = {}
        self._global: dict[str, str] = {}
        """Arguments before FROM, which only FROM and later ARGs of the same name see."""
        self._environment: set[str] = set()
        self._escape = escape
        self._command: DockerfileInstruction | None = None
        self._entrypoint: DockerfileInstruction | None = None

    def add(self, instruction: DockerfileInstruction) -> None:
        name = instruction.name
        if not self.base and name not in ("FROM", "ARG"):
            raise ValueError(f"{name} before FROM")
        match name:
            case "FROM":
                self.add_base(instruction)
            case "RUN":
                self._refuse_flags(instruction, ())
                self._add(StepKind.RUN, self._prefix() + self._shell(instruction))
            case "COPY" | "ADD":
                self.add_copies(instruction)
            case "ENV":
                pairs = [self._word(word) for number, word in enumerate(instruction.args) if number % 3 != 2]
                self._environment |= set(pairs[::2])
                self._add(StepKind.ENV, *pairs)
            case "ARG":
                for argument in instruction.args:
                    key, has_default, default = argument.partition("=")
                    value = self._given.get(key) or (self._word(default) if has_default else self._global.get(key))
                    if value is not None:
                        self._arguments[key] = value
            case "WORKDIR":
                path = self._word(instruction.args[0]) if instruction.args else ""
                self.folder = "" if "$" in path else path if path.startswith("/") else f"{self.folder}/{path}"
                self._add(StepKind.WORKDIR, path)
            case "USER":
                self._add(StepKind.USER, *(self._word(word) for word in instruction.args))
            case "CMD":
                self._command = instruction
            case "ENTRYPOINT":
                self._entrypoint = instruction
            case "SHELL" if instruction.args in _SHELLS:
                pass
            case _ if name in _HARMLESS:
                pass
            case _:
                raise ValueError(
                    f"{name} is not supported: FROM, RUN, COPY, ADD, ENV, ARG, WORKDIR, USER, CMD and ENTRYPOINT are"
                )

    def start_command(self) -> str:
        """Return the start command that ENTRYPOINT and CMD make together, by Docker's rules."""
        entrypoint, command = self._entrypoint, self._command
        if entrypoint is None:
            return "" if command is None else self._shell(command)
        if not entrypoint.json or command is None:
            return self._shell(entrypoint)
        words = command.args if command.json else ["/bin/sh", "-c", *command.args]
        return shlex.join([*entrypoint.args, *words])

    def _add(self, kind: StepKind, *arguments: str) -> None:
        self.steps.append(BuildStep(kind=kind, arguments=arguments))

    def add_base(self, instruction: DockerfileInstruction) -> None:
        self._refuse_flags(instruction, ("--platform",))
        if self.base:
            raise ValueError("a second FROM: builds of several stages are not supported")
        words = instruction.args
        if not words or (len(words) not in (1, 3)) or (len(words) == 3 and words[1].lower() != "as"):
            raise ValueError("FROM needs one image")
        self.base = self._word(words[0])
        if not self.base or "$" in self.base:
            raise ValueError(f"FROM {words[0]}: a variable has no value")
        self._global, self._arguments = self._arguments, {}

    def add_copies(self, instruction: DockerfileInstruction) -> None:
        options = self._refuse_flags(instruction, ("--chown", "--chmod", "--link"))
        mode = self._word(options.get("--chmod", ""))
        if mode and not _MODE.fullmatch(mode):
            raise ValueError(f"--chmod={mode}: must be an octal mode such as 0755")
        owner = self._word(options.get("--chown", ""))
        if instruction.heredocs or len(instruction.args) < 2:
            raise ValueError(f"{instruction.name} needs files and a target; here documents are not supported")
        *sources, target = (self._word(word) for word in instruction.args)
        for source in sources:
            if instruction.name == "ADD" and (_URL.match(source) or _ARCHIVE.search(source)):
                raise ValueError(f"ADD {source}: downloads and archives are not supported; use COPY and RUN")
            self._add(StepKind.COPY, source.lstrip("/") or ".", target, owner or "root", mode)

    def _refuse_flags(self, instruction: DockerfileInstruction, allowed: tuple[str, ...]) -> dict[str, str]:
        found = {}
        for flag in instruction.flags:
            name, _, value = flag.partition("=")
            if name not in allowed:
                raise ValueError(f"{instruction.name} {name} is not supported")
            found[name] = value
        return found

    def _prefix(self) -> str:
        """Return assignments of the build's arguments, which a RUN sees."""
        pairs = {name: value for name, value in self._arguments.items() if name not in self._environment}
        return "".join(f"export {name}={shlex.quote(value)}; " for name, value in pairs.items())

    def _shell(self, instruction: DockerfileInstruction) -> str:
        """Return an instruction's command for bash. Raises ValueError."""
        if instruction.json:
            return shlex.join(instruction.args)
        if not instruction.args:
            raise ValueError(f"{instruction.name} needs a command")
        line, heredocs = instruction.args[0], instruction.heredocs
        if len(heredocs) == 1 and parse_heredoc(line.strip()) is not None:
            script = heredocs[0]
            content = chomp_heredoc_content(script.content) if script.chomp else script.content
            if content.startswith("#!"):
                raise ValueError("RUN with a script that names its interpreter is not supported; COPY the script")
            return content
        return line + "".join(f"\n{one.content}{one.name}" for one in heredocs)

    def _word(self, word: str) -> str:
        """Return a word without quotes, with the build's arguments expanded and other variables left."""
        values = {name: value for name, value in self._arguments.items() if name not in self._environment}
        return ShellLex(self._escape, env=values).process_word(word)
