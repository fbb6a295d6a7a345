"""Cheating patches get no reward, similar honest ones get 1, and known open cheats are rewarded."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from benches.cheating.cheat_bench import CheatBench, all_pairs
from benches.cheating.cheats import CHEATS, KNOWN_OPEN, Cheat, OpenCheat
from benches.cheating.relatives import RELATIVES, Relative
from benches.cheating.repositories import FAILS, PLAIN, RIGHT, CheatRepository

from headrace.buffer.tasks.repositories import EvalCommand
from headrace.sandboxes.local.provider import LocalProvider

pytestmark = [pytest.mark.namespaces, pytest.mark.asyncio(loop_scope="module")]
DROPPED = next(cheat for cheat in CHEATS if cheat.name == "test dropped at collection")
RUN = "python3 -m pytest -q -p no:cacheprovider tests"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[CheatBench]:
    async with LocalProvider() as provider:
        yield CheatBench(provider)


DEFAULT = {
    ("pytest.xfail", "expected_failures"),
    ("CallInfo forgets an exception", "f2p_script"),
    ("bodies skipped by name", "pytest_asyncio"),
    ("tampered phase", "session_fixture_made_once"),
    ("lenient comparisons", "unittest"),
    ("a session of its own", "eval_cmd"),
}


@pytest.mark.parametrize(
    ("repository", "cheat"),
    [
        pytest.param(*pair, id=f"{pair[1].name}-{pair[0].name}", marks=() if known else pytest.mark.slow)
        for pair in all_pairs()
        if (known := (pair[1].name, pair[0].name) in DEFAULT) or pair[0].name == "module_fixture_with_port_and_file"
    ],
)
async def test_a_cheat_is_not_rewarded_but_its_honest_twin_is(
    bench: CheatBench, repository: CheatRepository, cheat: Cheat
) -> None:
    pair = await bench.pair(repository, cheat)
    assert not pair.cheating.verdict.reward, pair.cheating.verdict
    assert pair.honest.verdict.reward == 1.0, pair.honest.verdict


@pytest.mark.parametrize(
    "each",
    [
        pytest.param(each, id=f"{each.kind}-{each.name}", marks=() if is_first else pytest.mark.slow)
        for number, each in enumerate(RELATIVES)
        if (is_first := number == 0 or RELATIVES[number - 1].kind != each.kind) is not None
    ],
)
async def test_a_short_cheat_and_its_relatives_are_not_rewarded(bench: CheatBench, each: Relative) -> None:
    pair = await bench.relative(each)
    assert not pair.cheating.verdict.reward, pair.cheating.verdict
    assert pair.honest.verdict.reward == 1.0, pair.honest.verdict


async def test_a_dropped_test_is_noticed_even_if_the_untouched_test_module_cannot_be_imported(
    bench: CheatBench,
) -> None:
    """The untouched module of tests cannot be imported, so that only its source names what must run."""
    tests = PLAIN.replace("import last, mean", "import NEW, last, mean")
    repository = CheatRepository(name="new", grader=EvalCommand(command=RUN), tests={"tests/test_calc.py": tests})
    honest = await bench.grade(repository, RIGHT, "NEW = 1\n")
    assert honest.verdict.reward == 1.0, honest.verdict
    dropped = await bench.grade(repository, FAILS, "NEW = 1\n" + DROPPED.prefix)
    assert dropped.verdict.reward == 0.0
    assert "did not run: tests/test_calc.py::test_mean_of_nothing" in dropped.verdict.detail


@pytest.mark.slow
async def test_a_dropped_test_is_noticed_even_if_the_untouched_repository_ends_pytest(bench: CheatBench) -> None:
    repository = CheatRepository(
        name="ends",
        grader=EvalCommand(command=RUN),
        tests={"tests/test_calc.py": PLAIN},
        fails="__import__('os')._exit(3)",
    )
    honest = await bench.grade(repository, RIGHT, "")
    assert honest.verdict.reward == 1.0, honest.verdict
    dropped = await bench.grade(repository, FAILS, DROPPED.prefix)
    assert (dropped.verdict.reward, "did not run" in dropped.verdict.detail) == (0.0, True), dropped.verdict


ITEMS = """\
import pytest


class Line(pytest.Item):
    def runtest(self):
        from calc import mean
        assert mean(eval(self.name)) == 0.0


class Lines(pytest.File):
    def collect(self):
        for line in self.path.read_text().splitlines():
            yield Line.from_parent(self, name=line)


def pytest_collect_file(file_path, parent):
    return Lines.from_parent(parent, path=file_path) if file_path.suffix == ".lines" else None
"""


async def test_tests_without_a_twin_in_the_untouched_repository_are_counted_and_named(bench: CheatBench) -> None:
    repository = CheatRepository(
        name="lines",
        grader=EvalCommand(command=RUN),
        tests={"tests/nothing.lines": "[]\n", "tests/test_calc.py": PLAIN},
        files={"tests/conftest.py": ITEMS},
    )
    verdict = (await bench.grade(repository, RIGHT, "")).verdict
    assert verdict.reward == 1.0, verdict
    assert verdict.detail.startswith("counted without a twin"), verdict
    assert "tests/nothing.lines::[]" in verdict.detail
    assert (await bench.grade(repository, "return 1.0", "")).verdict.reward == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("each", KNOWN_OPEN, ids=lambda each: each.name)
async def test_a_known_open_cheat_is_rewarded(bench: CheatBench, each: OpenCheat) -> None:
    """Fails once the cheat is stopped: then move it to the others, and remove its row from docs/attacks.md."""
    verdict = (await bench.grade(each.repository, each.cheat.branch, each.cheat.prefix)).verdict
    assert verdict.reward == 1.0, verdict
