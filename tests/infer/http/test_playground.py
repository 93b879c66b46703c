"""The server's page in a real browser. Needs Chromium and its driver; skipped without them."""

import os
import shutil
import time

import pytest

pytest.importorskip("uvicorn")
webdriver = pytest.importorskip("selenium.webdriver")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("there is no chromium with a chromedriver", allow_module_level=True)

from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

from dflash_jax import Engine, SamplingParams, load_drafter, load_target  # noqa: E402
from dflash_jax.infer.http.server import Worker, make_app  # noqa: E402
from dflash_jax.infer.text import Text  # noqa: E402
from tests import tiny  # noqa: E402
from tests.fakes import vocabulary  # noqa: E402
from tests.infer.http.test_server import running, until  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    sizes = {"vocab_size": vocabulary.SIZE, "eos_token_id": vocabulary.END}
    vocabulary.write_tokenizer(tiny.write_target(directory, tiny.target_config(**sizes)))
    target = load_target(directory)
    drafting = {"mask_token_id": vocabulary.MASK}
    raw = tiny.drafter_config(vocab_size=vocabulary.SIZE, eos_token_id=None, dflash_config=drafting)
    drafter = load_drafter(tiny.write_drafter(tmp_path_factory.mktemp("drafter"), raw))
    made = {"max_length": 1024, "steps_per_visit": 2, "plain": True, "constraints": True}
    engine = Engine(target, drafter, slots=2, constraint_states=2**10, **made)
    engine.warm_up()
    worker = Worker(engine)
    worker.start()
    yield worker, Text(str(directory))
    worker.stop()


@pytest.fixture(scope="module")
def pages(worker):
    """Addresses of a server that asks for no key, and of one that does."""
    defaults = SamplingParams(16, eos_token_ids=(vocabulary.END,))
    apps = [make_app(*worker, defaults, model="tiny", api_key=key) for key in (None, "secret")]
    with running(apps[0]) as (plain, _), running(apps[1]) as (guarded, _):
        yield f"http://{plain}/", f"http://{guarded}/"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    home = tmp_path_factory.mktemp("browser")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={home}"):
        options.add_argument(argument)
    service = webdriver.ChromeService(DRIVER, env={**os.environ, "HOME": str(home)})
    driver = webdriver.Chrome(options, service)
    yield driver
    driver.quit()


def of(browser, selector):
    return browser.find_element(By.CSS_SELECTOR, selector)


def shown(browser, selector):
    return of(browser, selector).is_displayed()


def put(browser, selector, text):
    field = of(browser, selector)
    field.clear()
    field.send_keys(text)


@pytest.fixture
def page(browser, pages):
    browser.get(pages[0])
    until(lambda: shown(browser, "#form"))
    return browser


def finished(browser):
    until(lambda: of(browser, "#run").is_enabled())


def test_an_answer_streams_in_colours(page):
    put(page, "#prompt", "hello there")
    put(page, "#max_tokens", "40")
    of(page, "#run").click()
    finished(page)
    assert of(page, "#error").text == ""
    steps = page.find_elements(By.CSS_SELECTOR, "#first .text span")
    assert len({step.get_attribute("style") for step in steps}) > 1
    assert "".join(step.get_attribute("textContent") for step in steps)
    numbers = of(page, "#first .numbers").text
    assert numbers.startswith("40 tokens in ")
    assert "τ " in numbers
    assert "tokens/s" in numbers
    assert not shown(page, "#second")


def test_an_answer_has_the_form_of_a_schema(page):
    of(page, "#formed summary").click()
    put(page, "#schema", '{"enum": ["yes", "no"]}')
    of(page, "#run").click()
    finished(page)
    assert of(page, "#first .text").text in ('"yes"', '"no"')
    put(page, "#schema", "{")
    of(page, "#run").click()
    finished(page)
    assert "no JSON" in of(page, "#error").text
    put(page, "#schema", '{"not": {}}')
    of(page, "#run").click()
    finished(page)
    assert "/not" in of(page, "#error").text


@pytest.mark.parametrize("temperature", ["0", "0.9"])
def test_the_same_seed_without_speculation(page, temperature):
    put(page, "#temperature", temperature)
    put(page, "#max_tokens", "60")
    of(page, "#compare").click()
    of(page, "#prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    until(lambda: "equal" in of(page, "#verdict").text)
    finished(page)
    first, second = (of(page, f"#{name} .text").get_attribute("textContent") for name in ("first", "second"))
    assert first == second != ""
    assert "60 tokens in 59 steps · τ 1.00" in of(page, "#second .numbers").text
    assert "times as fast" in of(page, "#verdict").text


def test_escape_stops(page, worker):
    put(page, "#max_tokens", "1000")
    of(page, "#run").click()
    until(lambda: of(page, "#first .text").text)
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    finished(page)
    assert of(page, "#verdict").text == "Stopped."
    until(lambda: not worker[0].engine.busy)


def test_a_bad_setting_is_an_error_that_one_can_read(page):
    put(page, "#temperature", "-1")
    of(page, "#run").click()
    until(lambda: "temperature" in of(page, "#error").text)
    finished(page)


def test_a_key_is_asked_for(browser, pages):
    browser.get(pages[1])
    until(lambda: shown(browser, "#login"))
    assert not shown(browser, "#form")
    put(browser, "#key", "wrong")
    of(browser, "#login button").click()
    until(lambda: "did not take" in of(browser, "#error").text)
    put(browser, "#key", "secret" + Keys.ENTER)
    until(lambda: shown(browser, "#form"))
    of(browser, "#run").click()
    until(lambda: of(browser, "#first .text").text)
    finished(browser)
    browser.execute_script("sessionStorage.clear()")


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
def test_the_page_fits(page, width, scheme):
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    )
    of(page, "#run").click()
    finished(page)
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    if folder := os.environ.get("DFLASH_PICTURES"):
        time.sleep(0.2)
        page.save_screenshot(f"{folder}/playground-{scheme}.png")
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
