"""A headless Chromium for tests of pages; those that need one are skipped where there is none."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
PROGRAMS = {"browser": ("chromium", "chromium-browser", "google-chrome"), "driver": ("chromedriver",)}


def missing() -> str:
    """Why no browser can be started; "" if one can."""
    absent = [what for what, names in PROGRAMS.items() if not any(map(shutil.which, names))]
    try:
        import selenium  # noqa: F401
    except ImportError:
        absent.append("selenium")
    return f"needs a browser, and {' and '.join(absent)} cannot be found (apt-get install chromium-driver)" * bool(
        absent
    )


@contextmanager
def chromium(profile: Path, *, width: int = 1280, height: int = 900) -> Iterator[Any]:
    """A driver of a Chromium that starts with an empty profile; its performance log holds every request."""
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    found = {what: next(filter(None, map(shutil.which, names))) for what, names in PROGRAMS.items()}
    options = ChromeOptions()
    options.binary_location = found["browser"]
    for option in (*OPTIONS, f"--user-data-dir={profile}", f"--window-size={width},{height}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    environment = {**os.environ, "HOME": str(profile), "XDG_CACHE_HOME": str(profile), "XDG_CONFIG_HOME": str(profile)}
    driver = Chrome(options, ChromeService(found["driver"], env=environment))
    try:
        driver.set_script_timeout(60)
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, width: int, height: int) -> None:
    """Give the page a width, less than a window can have too."""
    fields = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", fields)
    _heard(driver)


def prefer(driver: Any, scheme: str) -> None:
    """Let the system prefer "light" or "dark"."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    _heard(driver)


def _heard(driver: Any) -> None:
    """Wait for a frame: styles are new at once, but a page's own scripts hear of changes before the next frame only."""
    driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")


def wait(true: Callable[[], Any], seconds: float = 30) -> None:
    """Wait until a condition of a page holds."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "the page did not get there"
        time.sleep(0.05)
