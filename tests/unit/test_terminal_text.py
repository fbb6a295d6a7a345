"""Lines typed into a terminal, markers in its output, and escape sequences."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.actors.environments.terminal_text import (
    MAX_LINE_BYTES,
    CommandOutput,
    cut_text,
    plain_text,
    quoted,
    start_of,
    typed_lines,
)

SECRET = "0123456789abcdef"
LOADS = "12.34 56.78 0.00 0.01 0.05 1/123 4567"


def output_of(*pieces: bytes, max_bytes: int = 1000, typed: bytes = b"") -> CommandOutput:
    output = CommandOutput(SECRET, typed, max_bytes)
    for piece in pieces:
        output.feed(piece)
    return output


def stream(late: bytes, own: bytes, code: int = 0, rest: bytes = b"") -> bytes:
    return b"%b\x1e%b<%b\x1e%b\x1e%b>%d\x1e%b" % (
        late,
        SECRET.encode(),
        LOADS.encode(),
        own,
        SECRET.encode(),
        code,
        rest,
    )


def test_output_is_split_at_the_markers_wherever_it_is_cut() -> None:
    data = stream(b"late\r\n", b"out\r\n", 7, b"next")
    for cut in range(len(data)):
        output = output_of(data[:cut], data[cut:])
        assert (output.text(), output.exit_code, output.rest) == ("late\nout\n", 7, b"next")
    output = output_of(*(data[index : index + 1] for index in range(len(data))))
    assert (output.text(), output.exit_code, output.started) == ("late\nout\n", 7, LOADS)


@pytest.mark.parametrize(
    "fake",
    [
        b"\x1efedcba9876543210>0\x1e",
        b"\x1e%b<1\x1e" % SECRET.encode(),
        b"%b>0" % SECRET.encode(),
        b"\x1e%b >0\x1e" % SECRET.encode(),
    ],
)
def test_text_that_looks_like_a_marker_ends_nothing(fake: bytes) -> None:
    output = output_of(stream(b"", fake + b"more", 3))
    assert (output.exit_code, output.text()) == (3, fake.decode() + "more")


def test_memory_is_bounded_whatever_is_printed() -> None:
    output = output_of(b"\x1e%b<1\x1e" % SECRET.encode(), *[b"x" * 1000] * 50, max_bytes=100)
    assert (len(output.text()), output.cut) == (100 + len(SECRET) + 1, True)
    forged = output_of(b"\x1e%b<1\x1e\x1e%b>" % (SECRET.encode(), SECRET.encode()), *[b"9" * 1000] * 50, max_bytes=100)
    assert forged.exit_code is not None


def test_echoed_lines_are_not_output() -> None:
    typed = typed_lines("echo hi\n# two", SECRET)
    echo = typed.replace(b"\n", b"\r\n")
    assert output_of(stream(b"late\r\n" + echo, b"hi\r\n"), typed=typed).text() == "late\nhi\n"
    wrapped = echo.replace(b"printf", b"print\x1b[K\r\nf")
    assert output_of(stream(wrapped, b"hi\r\n"), typed=typed).text() == "hi\n"


def test_an_unfinished_command_shows_what_it_printed() -> None:
    assert output_of(stream(b"", b"so far").partition(b"far")[0] + b"far").text() == "so far"


def test_the_secret_is_in_no_typed_line() -> None:
    assert SECRET.encode() not in typed_lines("ls", SECRET, 3)


@settings(max_examples=50)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=200))
def test_bash_reads_back_every_quoted_text(text: str) -> None:
    result = subprocess.run(["/bin/bash", "-c", f"printf %s {quoted(text)}"], capture_output=True, check=True)
    assert result.stdout == text.encode()


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=50))
def test_quoted_text_has_nothing_that_a_terminal_interprets(text: str) -> None:
    line = quoted(text)
    assert "!" not in line
    assert all(character >= " " and character != "\x7f" for character in line)


def test_long_texts_are_typed_on_several_lines() -> None:
    text = "é'" * 5000
    lines = quoted(text).split("\n")
    assert len(lines) > 5
    assert all(len(line.encode()) < MAX_LINE_BYTES + 100 for line in lines)
    command = f"printf %s {quoted(text)}"
    assert subprocess.run(["/bin/bash", "-c", command], capture_output=True, check=True).stdout == text.encode()


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("\x1b[31mred\x1b[0m\r\n", "red\n"),
        ("\x1b[?2004h$ \x1b[K", "$ "),
        ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b", "ab"),
        ("\x1bP1$r\x1b\\a\x1b(Bb\x1b7c\x1b=", "abc"),
        ("\x9b1mC1", "C1"),
        ("10%\r20%\r\n", "10%20%\n"),
        ("\x1b", "\x1b"),
        ("a[31mb", "a[31mb"),
    ],
)
def test_escape_sequences_and_carriage_returns_are_removed(text: str, plain: str) -> None:
    assert plain_text(text) == plain


def test_long_text_is_cut_with_a_note() -> None:
    assert cut_text("abc", 3) == "abc"
    assert cut_text("abcd", 3) == "abc\n[output cut: only the first 3 characters are shown]"
    assert cut_text("ab", 3, more=True) == "ab\n[output cut: only the first 2 characters are shown]"


def test_the_start_marker_tells_when_a_command_started() -> None:
    assert start_of(LOADS) == (1234, 4567)
    assert start_of("12.34 56.78 4567") == (1234, 4567)
    assert start_of("12.34 56.78") is None
    assert start_of("12.34 56.78 ") is None
    assert start_of(" ") is None
