"""The server's page in a real browser. Needs Chromium and its driver; skipped without them."""

import os
import shutil
import time

import pytest

pytest.importorskip("selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("there is no chromium with a chromedriver", allow_module_level=True)

from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

from tests.infer.http.serving import until  # noqa: E402


def started(home):
    """A browser without a window that keeps its files in this folder."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={home}"):
        options.add_argument(argument)
    service = webdriver.ChromeService(DRIVER, env={**os.environ, "HOME": str(home)})
    return webdriver.Chrome(options, service)


def of(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def shown(browser, selector):
    return of(browser, selector).is_displayed()


def put(browser, selector, text):
    field = of(browser, selector)
    field.clear()
    field.send_keys(text)


def opened(browser, address):
    browser.get(address)
    browser.execute_script("sessionStorage.clear()")
    browser.get(address)
    until(lambda: shown(browser, "#form"))
    return browser


def window(browser, width, scheme="light", height=800):
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    sizes = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)


def picture(browser, name):
    if folder := os.environ.get("DFLASH_PICTURES"):
        time.sleep(0.2)
        browser.save_screenshot(f"{folder}/playground-{name}.png")


def setting(browser, name, value):
    if not shown(browser, f"#{name}"):
        of(browser, "#settings summary").click()
    put(browser, f"#{name}", value)


def run(browser, prompt=None, *, wait=True):
    if prompt is not None:
        put(browser, "#prompt", prompt)
    of(browser, "#run").click()
    if wait:
        finished(browser)


def finished(browser):
    script = "return [...document.querySelectorAll('.turn')].every(turn => turn.dataset.state === 'done')"
    until(lambda: of(browser, "#run").is_enabled() and browser.execute_script(script))


def text(browser, panel):
    return of(browser, f".turn:last-child {panel} .text").get_attribute("textContent")


def figure(browser, panel, name):
    """A figure of a panel by its label."""
    pairs = browser.find_elements(By.CSS_SELECTOR, f".turn:last-child {panel} .figures div")
    found = {pair.find_element(By.TAG_NAME, "dt").text: pair.find_element(By.TAG_NAME, "dd").text for pair in pairs}
    return next(value for label, value in found.items() if name in label)


def colors(browser, panel=".first"):
    """Text of each step, and its color class."""
    spans = browser.find_elements(By.CSS_SELECTOR, f".turn:last-child {panel} .text span")
    return [(span.get_attribute("textContent"), span.get_attribute("class")) for span in spans]
