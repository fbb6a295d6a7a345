"""Debian's Chromium for tests of the page, without its network services, and axe-core to judge what it shows."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

SCREENS: Final = (("light", 1280), ("dark", 390))
"""Colour schemes and widths in pixels: each of both at least once."""
ALL_SCREENS: Final = (*SCREENS, ("dark", 1280), ("light", 390))
WAIT_S: Final = 60
_RUN_AXE: Final = """
const done = arguments[0];
axe.run().then((found) => done(found.violations.map(
  (one) => `${one.id}: ${one.nodes.map((node) => node.html.slice(0, 200) + ' ' + node.failureSummary).join(' | ')}`)));
"""


def missing() -> str:
    """Return why there is no browser test here; empty if there may be one."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed (apt-get install chromium chromium-driver)"
    for module in ("selenium", "axe_playwright_python"):
        if find_spec(module) is None:
            return f"{module} is not installed (the extra `dev`)"
    return ""


def axe_source() -> str:
    """Return the source of axe-core, without importing the package that brings it, which needs a browser of its own."""
    found = find_spec("axe_playwright_python")
    assert found is not None
    assert found.submodule_search_locations is not None
    return (Path(found.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8")


@contextmanager
def browser(*, javascript: bool = True) -> Iterator[Chrome]:
    """A browser without a window."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"):
        options.add_argument(argument)
    # Nothing but this host can be reached.
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    if not javascript:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_script_timeout(WAIT_S)
    try:
        yield driver
    finally:
        driver.quit()


@dataclass(frozen=True, slots=True)
class Screen:
    """A page of `url` (with a slash at its end) in one colour scheme and width."""

    driver: Chrome
    url: str

    def set(self, scheme: str, width: int) -> None:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def open(self, path: str) -> None:
        """Open a view, and wait until its charts are drawn and nothing in it is being computed."""
        from selenium.webdriver.support.ui import WebDriverWait

        self.driver.get(self.url + path)
        ready = (
            "return document.readyState === 'complete' && !document.querySelector('[data-pending]') && "
            "[...document.querySelectorAll('.chart .plot')].every((plot) => plot.childNodes.length > 0)"
        )
        WebDriverWait(self.driver, WAIT_S).until(lambda driver: driver.execute_script(ready))

    def violations(self) -> list[str]:
        """Return what axe-core finds, and whether the page scrolls sideways."""
        # The page's policy forbids foreign scripts; the debugger's own are not subject to it.
        self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": axe_source()})
        found: list[str] = self.driver.execute_async_script(_RUN_AXE)
        if self.number("document.documentElement.scrollWidth") > self.number("window.innerWidth"):
            found.append("the page scrolls sideways")
        return found

    def number(self, expression: str) -> float:
        return float(self.driver.execute_script(f"return {expression}"))

    def log(self) -> list[str]:
        """Return errors of the page since the last call: refused scripts and styles among them."""
        entries: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]
