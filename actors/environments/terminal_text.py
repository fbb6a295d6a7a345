"""Text of a terminal: the lines that are typed for a command, its markers in the output, and what a policy reads of it.

Invariants:
- The end of a command is known by a marker with a secret that is new for every command. The secret is typed in two
  halves, so that neither an echo of the typed text nor a trace of the shell (`set -x`) contains it.
- A command is typed as one quoted word for `eval`: unbalanced quotes, an unfinished here-document or a trailing
  backslash stay within it and cannot swallow the marker.
- Memory is bounded, whatever a command prints.

The secret is not hidden from the command itself, which runs in the shell that prints the marker. A command that forges
it deceives the policy that wrote it and nobody else: no reward depends on a terminal's output.
"""

from __future__ import annotations

import re
from typing import Final

MAX_LINE_BYTES: Final = 3000
"""Length of a typed line; a terminal drops what exceeds 4,095 bytes."""
_MAX_VALUE_BYTES: Final = 200
_SEPARATOR: Final = b"\x1e"
_ANSI: Final = re.compile(
    r"""
    (?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]         # control sequences: colours, cursor movement
    | \x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?      # commands of the operating system: titles, links
    | \x1b[PX^_][^\x1b]*(?:\x1b\\)?           # device control, private and application strings
    | \x1b[ -/]+[0-~]                         # character sets
    | \x1b[0-~]                               # other functions of two characters
    """,
    re.VERBOSE,
)
_START: Final = (
    "{ IFS= read -r _time < /proc/uptime; IFS= read -r _last < /proc/sys/kernel/ns_last_pid || "
    "IFS= read -r _last < /proc/loadavg; "
    """printf '\\036%s%s<%s %s\\036' HALVES "$_time" "$_last"; unset -v _time _last; } 2> /dev/null > /dev/tty"""
)
# The prompts are set here, since the shell prints one directly after the marker.
_END: Final = """{ printf '\\036%s%s>%s\\036' HALVES "$?"; PS1= PS2=; } 2> /dev/null > /dev/tty"""


def typed_lines(command: str, secret: str, last_exit_code: int = 0) -> bytes:
    """Return the lines that make a shell run a command and print its markers. The command finds `last_exit_code` in
    `$?`."""
    halves = f"{secret[: len(secret) // 2]} {secret[len(secret) // 2 :]}"
    # Only a subshell can restore an exit code without a function; most commands end with 0 and need none.
    restore = f"(exit {last_exit_code}) 2> /dev/null; " if last_exit_code else ""
    start, end = _START.replace("HALVES", halves), _END.replace("HALVES", halves)
    # The empty line resets bash's parser: after an `eval` that ended within a construct, it takes the `{` of the next
    # line for a plain word.
    return f"\n{start}; {restore}eval -- \\\n{quoted(command)}; {end}\n".encode()


def quoted(text: str) -> str:
    """Quote a text without null characters as one word of bash on lines of at most MAX_LINE_BYTES. It contains no
    control character that a terminal would interpret, and no `!`, which history expansion would replace."""
    lines: list[str] = []
    line, size = "$'", 0
    for character in text:
        if character in "\\'":
            piece = f"\\{character}"
        elif character == "!" or character < " " or character == "\x7f":
            piece = f"\\{ord(character):03o}"
        else:
            piece = character
        size += len(piece.encode())
        if size > MAX_LINE_BYTES:
            lines.append(f"{line}'\\\n")
            line, size = "$'", len(piece.encode())
        line += piece
    return "".join(lines) + f"{line}'"


class Head:
    """The first bytes of a stream; `cut` is set if there were more."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.data = bytearray()
        self.cut = False

    def add(self, data: bytes) -> None:
        room = self._max_bytes - len(self.data)
        self.data += data[:room]
        self.cut |= len(data) > room


class CommandOutput:
    """Output of a terminal for one command, split at the command's markers.

    `late` holds what came before the command started: output of background jobs, and the echo of the typed lines if a
    command has turned it on. `started` is the value of the start marker, `exit_code` that of the end marker, and `rest`
    holds what came after it.
    """

    def __init__(self, secret: str, typed: bytes, max_bytes: int) -> None:
        """`typed` are the lines that were typed with the secret (`typed_lines`)."""
        self._secret = secret.encode()
        self._typed = frozenset(typed.splitlines())
        self._pending = b""
        self._late, self._output = Head(max_bytes), Head(max_bytes)
        self.started: str | None = None
        self.exit_code: int | None = None

    def feed(self, data: bytes) -> None:
        """Add a piece of the terminal's output."""
        self._pending += data
        while self.exit_code is None:
            sink = self._late if self.started is None else self._output
            marker = _SEPARATOR + self._secret + (b"<" if self.started is None else b">")
            before, found, after = self._pending.partition(marker)
            if not found:
                # The marker may be split between two pieces.
                kept = max(0, len(self._pending) - len(marker) + 1)
                sink.add(self._pending[:kept])
                self._pending = self._pending[kept:]
                return
            value, closed, rest = after.partition(_SEPARATOR)
            if not closed and len(after) <= _MAX_VALUE_BYTES:
                return
            sink.add(before)
            self._pending = rest
            text = value[:_MAX_VALUE_BYTES].decode(errors="replace")
            if self.started is None:
                self.started = text
            else:
                self.exit_code = int(text) if text.isdecimal() else 1

    @property
    def rest(self) -> bytes:
        """What came after the end marker."""
        return self._pending if self.exit_code is not None else b""

    @property
    def cut(self) -> bool:
        return self._late.cut or self._output.cut

    def text(self) -> str:
        """Return the output as plain text: late output of background jobs, then the command's own."""
        pending = b"" if self.exit_code is not None else self._pending
        late, own = bytes(self._late.data), bytes(self._output.data)
        if self.started is None:
            late += pending
        else:
            own += pending
        late = b"".join(line for line in late.splitlines(keepends=True) if line.rstrip(b"\r\n") not in self._typed)
        if self._secret[: len(self._secret) // 2] in late:
            # An echo in another form, for example by readline.
            late = b""
        return plain_text((late + own).decode(errors="replace"))


def plain_text(text: str) -> str:
    """Return a terminal's text without escape sequences and carriage returns."""
    return _ANSI.sub("", text).replace("\r", "")


def cut_text(text: str, max_characters: int, *, more: bool = False) -> str:
    """Return the first characters of a text, with a note if there are more. `more` says that the text itself is only
    the beginning."""
    if len(text) <= max_characters and not more:
        return text
    return (
        f"{text[:max_characters]}\n[output cut: only the first {min(max_characters, len(text))} characters are shown]"
    )


def start_of(marker: str) -> tuple[int, int] | None:
    """Return when a command started, from its start marker: the time since boot in clock ticks of 10 ms, and the last
    process id by then: that of the sandbox's own namespace, or the last word of /proc/loadavg where the kernel does not
    tell that. None if the marker has other values, for example without /proc."""
    found = re.match(r"(\d+)\.(\d\d) (?:.* )?(\d+)$", marker)
    return None if found is None else (int(found[1] + found[2]), int(found[3]))
