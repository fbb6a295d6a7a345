"""The page of a run in Debian's Chromium: each view of a finished, a running, a killed and an empty run."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from headrace.actors.record.files.metrics import read_metrics
from headrace.actors.record.files.run_directory import RunDirectory
from headrace.actors.record.files.run_state import RunState, run_state
from headrace.actors.record.files.running import read_running
from support import browser_rig
from support.browser_rig import ALL_SCREENS, SCREENS, Screen, browser
from support.observer_rig import HOSTILE, hostile_run, simulated_run, write_configuration
from support.run_rig import RECIPE, start_driver

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(browser_rig.missing()), reason=browser_rig.missing()),
]
VIEWS = ("", "running", "slow", "steps", "engines", "pushes")
DEADLINE_S = 300.0
"""A guard against hanging."""
SHOTS = os.environ.get("HEADRACE_SCREENSHOTS", "")
"""Folder for screenshots to look at; none are written without it."""


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.2)


@contextmanager
def served(run: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """The page of a run, as `headrace observe` serves it: its URL and its token."""
    address = folder / f"{run.name}.json"
    address.unlink(missing_ok=True)
    server = start_driver("observe", str(run), "--json", str(address))
    try:
        wait_for(address.exists, server)
        document = json.loads(address.read_text())
        yield document["url"], document["token"]
    finally:
        server.terminate()
        _, errors = server.communicate(timeout=60)
        assert server.returncode == 0, errors.decode()
    assert not errors, errors.decode()


def check(run: Path, folder: Path, *more: str, kind: str) -> None:
    """Open each view in both schemes and both widths, and expect no violation, no error and nothing from elsewhere."""
    with served(run, folder) as (url, token), browser() as driver:
        screen = Screen(driver, url)
        driver.get(f"{url}#token={token}")
        screen.open("")
        # The first answer is the form, which has the status 401.
        assert all("401" in line for line in screen.log())
        for scheme, width in ALL_SCREENS if kind == "finished" else SCREENS:
            screen.set(scheme, width)
            for view in (*VIEWS, *more):
                screen.open(view)
                where = f"{kind}, /{view}, {scheme}, {width} px"
                assert screen.violations() == [], where
                # The browser notes the status of a rollout that does not exist.
                assert [line for line in screen.log() if "id=none" not in line] == [], where
                save(screen, f"{kind}-{view.partition('?')[0] or 'overview'}-{scheme}-{width}")


def save(screen: Screen, name: str) -> None:
    if SHOTS:
        height = min(int(screen.number("document.documentElement.scrollHeight")), 3000)
        size = {"width": int(screen.number("window.innerWidth")), "height": height, "deviceScaleFactor": 1}
        screen.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"mobile": False})
        screen.driver.save_screenshot(str(Path(SHOTS) / f"{name}.png"))
        screen.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"height": 900, "mobile": False})


def test_a_finished_run(tmp_path: Path) -> None:
    run = simulated_run(tmp_path / "finished")
    (run / "summary.json").write_text('{"completed": true}')
    check(run, tmp_path, "rollout?id=g000003-5", "rollout?id=none", kind="finished")


def test_an_empty_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    write_configuration(tmp_path / "empty")
    check(tmp_path / "empty", tmp_path, kind="empty")


def test_a_run_that_is_going_on_and_is_then_killed(tmp_path: Path) -> None:
    options = ("--runs-dir", str(tmp_path), "--name", "run", "--quiet", "--set", "training.steps=500")
    recipe = RECIPE.with_name("simulated.toml")
    driver = start_driver("run", str(recipe), *options)
    run = RunDirectory(path=tmp_path / "run")
    try:
        wait_for(lambda: has_step(run) and any(file.rollouts for file in read_running(run.path / "running")), driver)
        family = psutil.Process(driver.pid).children(recursive=True)
        rollout = next(file for file in read_running(run.path / "running") if file.rollouts).rollouts[0].rollout_id
        check(run.path, tmp_path, f"rollout?id={rollout}", kind="running")
        assert run_state(run) is RunState.RUNNING
    finally:
        driver.kill()
        driver.communicate()
    psutil.wait_procs(family, timeout=DEADLINE_S)
    assert run_state(run) is RunState.STOPPED
    with served(run.path, tmp_path) as (url, token), browser() as chromium:
        chromium.get(f"{url}#token={token}")
        Screen(chromium, url).open("running")
        assert "interrupted" in chromium.page_source
    check(run.path, tmp_path, f"rollout?id={rollout}", kind="killed")


def has_step(run: RunDirectory) -> bool:
    return run.metrics.exists() and bool(read_metrics(run.metrics, ("step",)))


def test_what_agents_write_runs_nowhere_and_reorders_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "hostile"
    folder.mkdir()
    asyncio.run(hostile_run(folder))
    long = {"time": 1.0, "level": "ERROR", "actor": "a", "rollout": "g000000-0", "message": HOSTILE * 100_000}
    (folder / "logs" / "a.jsonl").write_text(json.dumps(long) + "\n")
    check(folder, tmp_path, "rollout?id=g000000-0", kind="hostile")


def test_the_page_follows_the_run_and_can_be_paused(tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    run = simulated_run(tmp_path / "run")
    with served(run, tmp_path) as (url, token), browser() as driver:
        screen = Screen(driver, url)
        driver.get(f"{url}#token={token}")
        screen.open("steps")
        assert token not in driver.current_url
        wait = WebDriverWait(driver, browser_rig.WAIT_S)
        add_step(run, 9)
        wait.until(lambda driver: driver.find_elements(By.LINK_TEXT, "9"))
        button = driver.find_element(By.CSS_SELECTOR, "#updates button")
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        add_step(run, 10)
        # The stream tells of the change; the view stays as it is until updates go on.
        read = "fetch('steps').then((answer) => answer.text()).then(arguments[0])"
        wait.until(lambda driver: ">10</a>" in driver.execute_async_script(read))
        assert not driver.find_elements(By.LINK_TEXT, "10")
        button.click()
        wait.until(lambda driver: driver.find_elements(By.LINK_TEXT, "10"))


def add_step(run: Path, step: int) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "step", "time_s": 1e9, "step": %d, "version": "1.9", "reward": 0.5}\n' % step)


def test_without_javascript_the_form_opens_every_view(tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By

    run = simulated_run(tmp_path / "run")
    with served(run, tmp_path) as (url, token), browser(javascript=False) as driver:
        driver.get(f"{url}slow")
        driver.find_element(By.NAME, "token").send_keys(token)
        driver.find_element(By.TAG_NAME, "button").click()
        assert driver.current_url == f"{url}slow"
        while "data-pending" in driver.page_source:
            driver.refresh()
        link = driver.find_element(By.CSS_SELECTOR, "tbody a[href^='rollout']")
        link.click()
        assert driver.find_element(By.CSS_SELECTOR, ".waterfall table").is_displayed()
        driver.get(url)
        assert "The chart needs JavaScript" in driver.find_element(By.TAG_NAME, "main").text


def test_the_keyboard_reaches_everything_and_shows_where_it_is(tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    run = simulated_run(tmp_path / "run")
    with served(run, tmp_path) as (url, token), browser() as driver:
        driver.get(f"{url}#token={token}")
        screen = Screen(driver, url)
        screen.open("slow")
        seen = []
        for _ in range(16):
            ActionChains(driver).send_keys(Keys.TAB).perform()
            active = driver.switch_to.active_element
            seen.append(re.sub(r"\s+", " ", active.text or active.get_attribute("aria-label") or active.tag_name))
            style = driver.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
            assert style != "none", seen
        assert seen[0] == "Skip to content"
        assert seen[2:8] == ["Overview", "Running", "Slow", "Steps", "Engines", "Pushes"]
        assert "Causes of slowness" in seen or any("boot" in each for each in seen)
