"""A server and a browser for the tests here; what these need is imported where there is a test for it."""

import threading

import pytest

from dflash_jax import Engine, SamplingParams, load_drafter, load_target
from dflash_jax.infer.text import Text
from tests import tiny
from tests.fakes import vocabulary


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tmp_path_factory.mktemp("server")
    tiny.write_target(directory, tiny.target_config())
    tiny.write_tokenizer(directory)
    return Text(str(directory))


@pytest.fixture(scope="module")
def server(text, tmp_path_factory):
    """Address of a server with two slots, and its worker."""
    from dflash_jax.infer.http.server import Worker
    from tests.infer.http.serving import serving

    target = load_target(text._directory)
    drafter = load_drafter(tiny.write_drafter(tmp_path_factory.mktemp("drafter"), tiny.drafter_config()))
    engine = Engine(target, drafter, slots=2, max_length=256, steps_per_visit=2, logprobs=20, plain=True)
    engine.warm_up()
    worker = Worker(engine, most_waiting=8)
    worker.start()
    with serving(worker, text) as (address, _):
        yield f"http://{address}", worker
    worker.stop()


@pytest.fixture(scope="module")
def hasty(server, text):
    """Address of a server that waits only a second for its clients."""
    from tests.infer.http.serving import HASTY, serving

    with serving(server[1], text, HASTY) as (address, _):
        yield f"http://{address}"


@pytest.fixture
def held(server, monkeypatch):
    """The engine makes no step before this is set."""
    go_on, step = threading.Event(), server[1].engine.step
    monkeypatch.setattr(server[1].engine, "step", lambda **options: go_on.wait(300) and step(**options))
    yield go_on
    go_on.set()


@pytest.fixture
def client(server):
    import openai

    from tests.infer.http.serving import KEY

    with openai.OpenAI(base_url=server[0] + "/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """Of an engine that serves constraints, and the text of its target."""
    from dflash_jax.infer.http.server import Worker

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
    from dflash_jax.infer.http.server import make_app
    from tests.infer.http.serving import running

    defaults = SamplingParams(16, eos_token_ids=(vocabulary.END,))
    apps = [make_app(*worker, defaults, model="tiny", api_key=key) for key in (None, "secret")]
    with running(apps[0]) as (plain, _), running(apps[1]) as (guarded, _):
        yield f"http://{plain}/", f"http://{guarded}/"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    from tests.infer.http.browsing import started

    driver = started(tmp_path_factory.mktemp("browser"))
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, pages):
    from tests.infer.http.browsing import opened

    yield opened(browser, pages[0])
    browser.execute_script("sessionStorage.clear()")
