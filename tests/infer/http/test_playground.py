"""The server's page in a real browser, which speaks to a server."""

import itertools
import json
import re

import pytest

pytest.importorskip("selenium")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.infer.http.browsing import figure, finished, of, picture, put, run, setting, shown, text, window
from tests.infer.http.serving import until

pytestmark = pytest.mark.slow


def test_both_answers_stand_side_by_side_and_are_equal(page):
    window(page, 1280)
    setting(page, "max_tokens", "40")
    run(page, "hello there")
    assert of(page, "#error").text == ""
    assert text(page, ".first") == text(page, ".second") != ""
    assert figure(page, ".first", "tokens in") == figure(page, ".second", "tokens in") == "40"
    assert figure(page, ".second", "acceptance length") == "1.00"
    assert float(figure(page, ".first", "acceptance length")) >= 1
    for panel in (".first", ".second"):
        assert float(figure(page, panel, "tokens/s")) > 0
        assert re.fullmatch(r"[\d.]+ m?s", figure(page, panel, "time to first token"))
    assert of(page, ".first .ran").text == "ran with block size 8"
    assert of(page, ".first h3").text == "With speculation"
    assert of(page, ".second h3").text == "Baseline without speculation"
    assert "Both texts are identical." in of(page, ".verdict").text
    assert re.search("with speculation|without speculation", of(page, ".verdict strong").text)
    first, second = (of(page, panel).rect for panel in (".first", ".second"))
    assert first["y"] == second["y"]
    assert first["x"] + first["width"] <= second["x"]
    window(page, 390)
    first, second = (of(page, panel).rect for panel in (".first", ".second"))
    assert first["y"] + first["height"] <= second["y"]


def test_drawn_answers_are_equal_too_and_speculation_can_be_left_out(page):
    setting(page, "temperature", "0.9")
    setting(page, "max_tokens", "60")
    of(page, "#prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    until(lambda: page.find_elements(By.CSS_SELECTOR, ".turn"))
    finished(page)
    drawn = text(page, ".first")
    assert drawn == text(page, ".second") != ""
    of(page, "#fresh").click()
    put(page, "#prompt", of(page, "#history button span").get_attribute("textContent"))
    page.execute_script("arguments[0].value = 1", of(page, "#speculation"))
    run(page)
    assert not page.find_elements(By.CSS_SELECTOR, ".first")
    assert text(page, ".second") == drawn


def test_an_answer_has_the_form_of_a_schema(page):
    of(page, "#compare").click()
    setting(page, "schema", '{"enum": ["yes", "no"]}')
    run(page)
    assert text(page, ".first") in ('"yes"', '"no"')
    put(page, "#schema", "{")
    run(page, "again")
    assert "not valid JSON" in of(page, "#schema-wrong").text
    put(page, "#schema", '{"not": {}}')
    run(page, wait=False)
    until(lambda: "/not" in of(page, "#schema-wrong").text)
    assert of(page, "#schema").get_attribute("aria-invalid") == "true"
    assert of(page, "#error").text == ""
    assert of(page, "#prompt").get_attribute("value") == "again"
    assert len(page.find_elements(By.CSS_SELECTOR, ".turn")) == 1  # of what was refused, nothing is left


def test_escape_stops(page, worker):
    setting(page, "max_tokens", "1000")
    run(page, wait=False)
    until(lambda: page.find_elements(By.CSS_SELECTOR, ".first .text span"))
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    finished(page)
    assert of(page, ".first .state").text == "stopped"
    assert text(page, ".first")
    until(lambda: not worker[0].engine.busy)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("temperature", "-1", "Give a number between 0 and 10."),
        ("top_k", "1.5", "Give a whole number between 0 and 1000000."),
        ("max_tokens", "-5", "Give a whole number between 1 and 1024."),
        ("seed", "", "Give a whole number between 0"),
        ("prompt", "  ", "Write a prompt first."),
    ],
)
def test_what_cannot_be_sent_is_said_at_its_field(page, name, value, said):
    page.execute_script("window.sent = 0; window.fetch = async () => { window.sent += 1 }")
    setting(page, name, value)
    run(page)
    assert of(page, f"#{name}-wrong").text.startswith(said)
    assert of(page, f"#{name}").get_attribute("aria-describedby") == f"{name}-wrong"
    assert page.switch_to.active_element.get_attribute("id") == name
    assert page.execute_script("return window.sent") == 0
    of(page, f"#{name}").send_keys("1")
    assert not shown(page, f"#{name}-wrong")


def test_what_the_server_refuses_is_said_at_its_field(page):
    page.execute_script("arguments[0].value = 'word '.repeat(2000)", of(page, "#prompt"))
    run(page, wait=False)
    until(lambda: page.find_elements(By.CSS_SELECTOR, "#prompt-wrong:not(:empty)"))
    assert "no room" in of(page, "#prompt-wrong").text
    page.execute_script("arguments[0].max = 9999", of(page, "#max_tokens"))
    refusals = {"temperature": ("temperature is not good", None), "top_p": ("between us", "top_p")}
    for field, (message, param) in refusals.items():
        answer = json.dumps({"error": {"message": message, "param": param}})
        page.execute_script(f"window.fetch = async () => new Response({json.dumps(answer)}, {{status: 400}})")
        run(page, "hello", wait=False)
        until(lambda field=field: page.find_elements(By.CSS_SELECTOR, f"#{field}-wrong:not(:empty)"))
        assert of(page, f"#{field}-wrong").text == message


def test_a_conversation_goes_on_and_outlives_a_reload(page):
    of(page, "#compare").click()
    setting(page, "max_tokens", "8")
    put(page, "#system", "be brief")
    page.execute_script(
        "window.sent = []; const old = fetch;"
        "window.fetch = (path, given) => (window.sent.push(JSON.parse(given.body)), old(path, given))"
    )
    run(page, "first")
    answered = text(page, ".first")
    assert of(page, "#asks").text == "Follow-up"
    run(page, "second")
    messages = page.execute_script("return window.sent")[1]["messages"]
    assert [one["role"] for one in messages] == ["system", "user", "assistant", "user"]
    assert [one["content"] for one in messages] == ["be brief", "first", answered, "second"]
    of(page, "#fresh").click()
    assert not page.find_elements(By.CSS_SELECTOR, ".turn")
    run(page, "third")
    assert len(page.execute_script("return window.sent")[2]["messages"]) == 2
    put(page, "#prompt", "not sent yet")
    page.refresh()
    until(lambda: shown(page, "#form"))
    assert of(page, "#prompt").get_attribute("value") == "not sent yet"
    assert of(page, "#max_tokens").get_attribute("value") == "8"
    entries = page.find_elements(By.CSS_SELECTOR, "#history button")
    assert [entry.text.split("\n")[0] for entry in entries] == ["third", "first"]
    assert [turn.text for turn in page.find_elements(By.CSS_SELECTOR, ".asked")] == ["third"]
    assert "2 turns · τ " in entries[1].text
    entries[1].click()
    assert [turn.text for turn in page.find_elements(By.CSS_SELECTOR, ".asked")] == ["first", "second"]
    assert of(page, ".turn .first .text").get_attribute("textContent") == answered


def test_a_key_is_asked_for(browser, pages):
    browser.get(pages[1])
    until(lambda: shown(browser, "#login"))
    assert not shown(browser, "#form")
    put(browser, "#key", "wrong")
    of(browser, "#login button").click()
    until(lambda: "did not take" in of(browser, "#error").text)
    put(browser, "#key", "secret" + Keys.ENTER)
    until(lambda: shown(browser, "#form"))
    of(browser, "#compare").click()
    run(browser, "hello")
    assert text(browser, ".first")
    browser.execute_script("sessionStorage.clear()")


def test_the_page_fits_and_loads_nothing_from_elsewhere(page, pages):
    fits = lambda width: page.execute_script("return document.documentElement.scrollWidth") <= width
    window(page, 390)
    page.execute_script("document.getElementById('settings').open = true")
    assert fits(390)
    setting(page, "max_tokens", "40")
    run(page, "word " * 40 + "x" * 200)
    for width, scheme in itertools.product((390, 1280), ("light", "dark")):
        window(page, width, scheme)
        assert fits(width)
        picture(page, f"{width}-{scheme}")
    of(page, "#view label:nth-of-type(2)").click()
    window(page, 390)
    assert fits(390)
    loaded = page.execute_script("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert len(loaded) >= 4
    assert all(name.startswith(pages[0]) for name in loaded)
