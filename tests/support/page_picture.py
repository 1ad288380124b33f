"""A picture of a server's page, for the docs: `python -m tests.support.page_picture ADDRESS TEXT FILE.png`."""

from __future__ import annotations

import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from urllib.parse import urlencode

from PIL import Image
from tests.support.browser import chromium, prefer, resize


def save(address: str, text: str, file: Path) -> None:
    with tempfile.TemporaryDirectory() as profile, chromium(Path(profile)) as browser:
        prefer(browser, "light")
        resize(browser, 1100, 700)
        browser.get(f"{address}/#{urlencode({'text': text})}")
        while not browser.find_elements("css selector", ".layers"):
            time.sleep(0.1)
        browser.execute_script("document.activeElement.blur()")
        resize(browser, 1100, browser.execute_script("return document.documentElement.scrollHeight"))
        picture = Image.open(BytesIO(browser.get_screenshot_as_png())).convert("RGB")
        picture.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


if __name__ == "__main__":
    save(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
