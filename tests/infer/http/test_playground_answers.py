"""The server's page in a real browser, with answers that are written here and have times of their own."""

import json
import re
import time

import pytest

pytest.importorskip("selenium")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.infer.http.browsing import colors, figure, finished, of, opened, run, shown, text, window
from tests.infer.http.serving import until

pytestmark = pytest.mark.slow


CHAIN = {"block_size": 16, "tree": 0, "budget": 0, "proposed": 15}
TREE = {"block_size": 16, "tree": 31, "budget": 0, "proposed": 31}
NONE = {"block_size": 1, "tree": 0, "budget": 0, "proposed": 0}
SCRIPT = """
const real = window.fetch, encoder = new TextEncoder();
const wait = milliseconds => new Promise(resolve => setTimeout(resolve, milliseconds));
window.fetch = async (path, given) => {
  if (path === "v1/models") {
    const reply = await (await real(path, given)).json();
    Object.assign(reply.data[0].dflash, {block_size: "auto"}, ABOUT);
    return Response.json(reply);
  }
  const answer = JSON.parse(given.body).speculation === false ? SECOND : FIRST;
  return new Response(new ReadableStream({async start(out) {
    for (const [milliseconds, event] of answer) {
      await wait(milliseconds);
      out.enqueue(encoder.encode(`data: ${JSON.stringify(event)}\\n\\n`));
    }
    out.close();
  }}));
};
"""


def sent(chunks, *, alone=True, seconds=None):
    """Events of an answer, each after so many milliseconds; a chunk is its milliseconds, steps and draft."""
    steps = [step for _, steps, _ in chunks for step in steps]
    seconds = sum(wait for wait, _, _ in chunks[1:]) / 1000 if seconds is None else seconds
    tokens = sum(count for count, _ in steps)
    report = {"steps": len(steps) - 1, "acceptance_lengths": [], "tau": 1.0, "decode_seconds": seconds}
    report |= {"tokens_per_second": (tokens - 1) / seconds, "alone": alone}
    events = []
    for i, (wait, some, draft) in enumerate(chunks):
        choice = {"index": 0, "delta": {"content": "".join(piece for _, piece in some)}, "steps": some}
        choice |= {"draft": draft} if draft else {}
        last = {"speculation": report, "metrics": {"time_to_first_token_ms": 250}} if i == len(chunks) - 1 else {}
        events.append([wait, {"choices": [choice]} | last])
    return events


def whole(pieces, draft, seconds=1.0, **report):
    """An answer that comes at once; each piece is a step of as many tokens as it has words."""
    steps = [[len(piece.split()) or 1, piece] for piece in pieces]
    return sent([(0, steps[:1], None), (5, steps[1:], draft)], seconds=seconds, **report)


@pytest.fixture
def written(browser, pages):
    """Opens a page that gets these answers with and without speculation."""
    made = []

    def opens(first, second=(), **about):
        script = SCRIPT.replace("FIRST", json.dumps(first)).replace("SECOND", json.dumps(second))
        source = {"source": script.replace("ABOUT", json.dumps(about))}
        made.append(browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", source))
        return opened(browser, pages[0])

    window(browser, 1280)
    yield opens
    for script in made:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
    browser.execute_script("sessionStorage.clear()")


# Steps and clocks of both panels at every frame.
WATCH = """
window.seen = [];
const look = () => {
  const turn = document.querySelector(".turn");
  if (turn && turn.dataset.state === "racing")
    window.seen.push([performance.now(), ...[".first", ".second"].map(panel => [
      turn.querySelectorAll(`${panel} .text span`).length,
      parseFloat(/[\\d.]+/.exec(turn.querySelector(`${panel} .state`).textContent)[0])])]);
  requestAnimationFrame(look);
};
look();
"""


def test_the_replay_keeps_the_recorded_pace(written):
    pieces = [[1, f" w{i}"] for i in range(12)]
    fast = sent([(20, pieces[:1], None), (150, [[4, " a b c d"]], CHAIN), (900, [[7, " e f g h i j k"]], CHAIN)])
    slow = sent([(20, pieces[:1], None), *((200, pieces[i : i + 1], NONE) for i in range(1, 12))])
    page = written(fast, slow)
    page.execute_script(WATCH)
    begin = time.monotonic()
    run(page)
    assert time.monotonic() - begin > 1.05 + 2.2 + 2.2  # recorded one after the other, replayed together
    kept = page.execute_script("return JSON.parse(sessionStorage.getItem('conversations'))")[0]["turns"][0]
    times = [[step[0] / 1000 for step in recording["steps"]] for recording in kept["recordings"]]
    assert times[0][0] == times[1][0] == 0
    assert times[0][1] == pytest.approx(0.15, abs=0.1)
    assert times[0][2] == pytest.approx(1.05)
    assert times[1][-1] == pytest.approx(2.2)
    seen = page.execute_script("return window.seen")
    assert len(seen) > 10
    for _, *panels in seen:
        for (count, clock), at in zip(panels, times, strict=True):
            least = sum(moment < clock - 0.006 for moment in at)
            assert least <= count <= sum(moment <= clock + 0.006 for moment in at)
    began, *_, (_, first) = seen[0]
    for now, *_, (_, clock) in seen:  # neither ahead of the clock on the wall nor behind it, but for slow frames
        assert abs((now - began) / 1000 - (clock - first)) < 0.6
    assert any(first[0] == 3 and second[0] < 12 for _, first, second in seen)  # the race is seen


def test_a_short_answer_is_replayed_in_slow_motion_and_can_be_skipped(written):
    page = written(whole(["a", " b c"], CHAIN, 0.5), whole(["a", " b", " c"], NONE, 1.1))
    run(page, wait=False)
    until(lambda: page.find_elements(By.CSS_SELECTOR, ".turn[data-state=racing]"))
    assert "slow motion: 1/2 speed" in of(page, ".verdict").text
    of(page, ".tools button").click()
    finished(page)
    assert of(page, ".verdict strong").text == "2.2\u00d7 as fast with speculation"
    of(page, ".tools button").click()
    until(lambda: of(page, ".tools button").text == "Skip to the end")
    page.switch_to.active_element.send_keys(Keys.ESCAPE)
    finished(page)


def test_what_auto_chose_is_said(written):
    first = [(0, [[1, "a"]], None), (5, [[5, " b c d e f"], [1, " g"]], CHAIN), (5, [[2, " h i"]], TREE)]
    page = written(sent([*first, (5, [[1, " j"]], NONE)], seconds=1.0))
    of(page, "#compare").click()
    run(page)
    assert of(page, ".ran").text == (
        "auto chose block size 16 (2 of 4 steps); block size 16, tree of 31 tokens (1 of 4 steps); "
        "no speculation (1 of 4 steps)"
    )
    assert figure(page, ".first", "acceptance length") == "2.25"
    assert figure(page, ".first", "time to first token") == "250 ms"


def test_a_request_is_limited_to_a_block_size(written):
    small = CHAIN | {"block_size": 4, "proposed": 3}
    page = written(whole(["a", " b c"], small), whole(["a", " b", " c"], NONE), block_sizes=[1, 4, 16])
    options = page.find_elements(By.CSS_SELECTOR, "#speculation option")
    labels = [option.get_attribute("textContent") for option in options]
    assert labels == ["automatic", "off (block size 1)", "block size up to 4"]
    page.execute_script(
        "window.asked = []; const send = window.fetch;"
        "window.fetch = (path, given) => { window.asked.push(JSON.parse(given.body)); return send(path, given) }"
    )
    of(page, "#settings summary").click()
    of(page, "#speculation").send_keys("block")  # the driver's own click on an option sends no input event
    assert "block size up to 4" in of(page, "#set").text
    run(page)
    assert [asked["speculation"] for asked in page.execute_script("return window.asked")] == [
        {"max_block_size": 4},
        False,
    ]
    assert of(page, ".first .ran").text == "auto up to block size 4 chose block size 4"
    assert of(page, ".second .ran").text == "speculation off: one token per step"
    page.refresh()
    until(lambda: shown(page, "#form"))
    assert of(page, "#speculation").get_property("value") == "4"  # the settings outlive a reload


def test_few_steps_with_speculation_are_no_claim_about_it(written):
    first = [(0, [[1, "a"]], None), (5, [[2, " b c"]], CHAIN), (5, [[1, " d"], [1, " e"]], NONE)]
    page = written(sent(first, seconds=1.0), whole(["a", " b", " c", " d", " e"], NONE, 3.0))
    run(page)
    assert of(page, ".verdict strong").text == "Speculation in 1 of 3 steps"
    assert not re.search("faster|slower|as fast", of(page, "#page").text)


def test_a_page_does_not_claim_speculation_where_none_ran(written):
    pieces = [f" w{i}" for i in range(20)]
    page = written(whole(pieces, NONE, 1.0), whole(pieces, NONE, 1.3))
    run(page)
    assert of(page, ".first h3").text == "No speculation, by choice of auto"
    assert of(page, ".first .ran").text == "auto chose no speculation"
    assert of(page, ".verdict strong").text == "No speculation"
    everything = of(page, "#thread").text
    assert "With speculation" not in everything
    assert not re.search("faster|slower|as fast", everything + of(page, "#history").text)
    assert not shown(page, ".first .graphs")
    assert {name for _, name in colors(page)} == {""}  # one token a step: nothing to color


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ((1.0, 0.96), "4% slower with speculation"),
        ((1.0, 1.23), "23% faster with speculation"),
        ((1.0, 3.1), "3.1\u00d7 as fast with speculation"),
        ((1.0, 1.001), "As fast as without speculation"),
    ],
)
def test_how_the_speeds_compare(written, seconds, said):
    page = written(whole(["a", " b c"], CHAIN, seconds[0]), whole(["a", " b", " c"], NONE, seconds[1]))
    run(page)
    assert of(page, ".verdict strong").text == said
    assert "times" not in of(page, ".verdict").text


def test_answers_with_company_or_other_texts(written):
    page = written(whole(["a", " b c"], CHAIN), whole(["a", " b", " d"], NONE, alone=False), dtype="bfloat16")
    run(page)
    said = of(page, ".verdict").text
    assert "so the speeds do not compare" in said
    assert "differ from character 5 on" in said
    assert "bfloat16" in said
    assert [piece for piece, name in colors(page, ".second") if "differs" in name] == [" d"]


def test_steps_of_several_tokens_alternate_between_two_colors(written):
    page = written(whole(["a", " b c d", " e", " f g", " h i"], CHAIN))
    of(page, "#compare").click()
    run(page)
    assert colors(page) == [("a", ""), (" b c d", "odd"), (" e", ""), (" f g", "even"), (" h i", "odd")]
    bars = page.find_elements(By.CSS_SELECTOR, ".strip i")
    assert [bar.get_attribute("class") for bar in bars] == ["odd", "", "even", "odd"]
    share = lambda bar: bar.find_element(By.TAG_NAME, "b").rect["height"] / bar.rect["height"]
    assert [share(bar) for bar in bars] == pytest.approx([3 / 16, 1 / 16, 2 / 16, 2 / 16], abs=0.02)
    assert [one.text for one in page.find_elements(By.CSS_SELECTOR, ".histogram div")] == ["1\n1", "2\n2", "1\n3"]
    page.find_elements(By.CSS_SELECTOR, ".text span")[1].click()
    told = "Step 1: 3 tokens; 2 of 15 draft tokens accepted, and one from the target."
    assert of(page, ".note").text == told
    assert shown(page, "#legend")


def luminance(color):
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", color)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colors_can_be_told_apart_and_read(written, scheme):
    page = written(whole(["a", " b c d", " f g"], CHAIN))
    window(page, 1280, scheme)
    of(page, "#compare").click()
    run(page)
    style = lambda selector, name: of(page, selector).value_of_css_property(name)
    card, ink = style(".answer", "background-color"), style(".text", "color")
    lines = [re.search(r"rgba?\([^)]*\)", style(f".text .{name}", "box-shadow"))[0] for name in ("odd", "even")]
    for name, line in zip(("odd", "even"), lines, strict=True):
        assert contrast(style(f".text .{name}", "background-color"), ink) >= 7
        assert contrast(line, card) >= 3
    assert lines[0] != lines[1]
    assert contrast(style(".figures dt", "color"), card) >= 4.5


MARKDOWN = """# Title

Some **bold**, *italic* and `code<b>`.
1. one
2. two
   - inner

```html
<i>kept **as it is**</i>
```

<img src=x onerror="document.title = 'changed'"><script>document.title = 'changed'</script>
[link](javascript:alert(1)) a_b_c 2 * 3 * 4
"""


def test_markdown_is_shown_and_html_is_text(written):
    page = written(whole(["#", MARKDOWN[1:]], CHAIN))
    of(page, "#compare").click()
    run(page)
    of(page, "#view label:nth-of-type(2)").click()
    answer = of(page, ".text")
    inside = lambda selector: answer.find_elements(By.CSS_SELECTOR, selector)
    found = lambda selector: [one.get_attribute("textContent") for one in inside(selector)]
    assert found("h3") == ["Title"]
    assert found("strong") == ["bold"]
    assert found("em") == ["italic"]
    assert found("p code") == ["code<b>"]
    assert found("pre code") == ["<i>kept **as it is**</i>"]
    assert found("ol > li") == ["one", "twoinner"]
    assert found("ol ul li") == ["inner"]
    assert found("img, script, a, b, i") == []
    assert "<img src=x onerror=" in answer.text
    assert "[link](javascript:alert(1)) a_b_c 2 * 3 * 4" in answer.text
    assert page.title == "dflash_jax playground"
    of(page, "#view label:nth-of-type(1)").click()
    assert text(page, ".first") == MARKDOWN
    page.execute_script("navigator.clipboard.writeText = async text => { window.copied = text }")
    of(page, ".copy").click()
    assert page.execute_script("return window.copied") == MARKDOWN


def test_something_is_seen_while_nothing_has_come(written):
    page = written(sent([(4000, [[1, "a"]], None), (5, [[2, " b c"]], CHAIN)], seconds=1.0))
    of(page, "#compare").click()
    run(page, wait=False)
    until(lambda: "waiting for the first token" in of(page, ".first .state").text)
    assert of(page, ".first h3").text == "Speculation: auto"
    window(page, 390)
    stop = page.execute_script("return document.getElementById('stop').getBoundingClientRect().toJSON()")
    assert 0 <= stop["top"] < stop["bottom"] <= 800  # in sight, wherever the form is
    finished(page)
    assert of(page, ".first h3").text == "With speculation"


def test_a_server_without_a_drafter(written):
    page = written(whole(["a", " b", " c"], NONE), block_size=1, speculation=False, switchable=False, drafter=None)
    assert "no drafter" in of(page, "#about").text
    assert not shown(page, "#compared")
    run(page)
    assert of(page, ".first h3").text == "Answer"
    assert of(page, ".ran").text == "this server has no drafter"
