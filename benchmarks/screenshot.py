"""The picture of the playground in docs/http.md: a browser asks a server that runs, and waits for the end of the race.

    dflash-jax serve --block-size 16
    python -m benchmarks.screenshot http://127.0.0.1:8000/ docs/figures/playground.png

Needs what the tests of the page need: selenium, Chromium and its driver.
"""

import sys
import tempfile

from tests.infer.http.browsing import of, opened, run, started, window

WIDTH = 1280


def main(address: str, path: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        browser = started(home)
        try:
            page = opened(browser, address)
            window(page, WIDTH)
            run(page)
            of(page, ".first .strip i:last-child").click()
            height = page.execute_script("return document.documentElement.scrollHeight")
            window(page, WIDTH, height=height)
            page.execute_script("scrollTo(0, 0)")
            page.save_screenshot(path)
        finally:
            browser.quit()


if __name__ == "__main__":
    main(*sys.argv[1:])
