"""Log-probabilities of prompts: the target's own, as transformers has them."""

import threading

import jax
import numpy as np
import pytest

from dflash_jax import Engine, load_target
from dflash_jax.infer.engine.scoring import chunk_of, compile_scores, read_scores
from dflash_jax.mesh import make_mesh, parse_mesh
from tests import tiny

PROMPT = np.random.default_rng(3).integers(0, tiny.VOCAB - 2, 77).tolist()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny.write_target(tmp_path_factory.mktemp("scoring"), tiny.target_config())


def scores(engine, prompt=PROMPT):
    """Of a prompt, and how often the engine could make a step meanwhile."""
    reading, pauses = read_scores(engine, prompt), 0
    try:
        while True:
            next(reading)
            pauses += 1
    except StopIteration as done:
        return done.value, pauses


@pytest.fixture(scope="module")
def expected(directory):
    """Log-probabilities [T - 1, V] of what follows each token, by transformers."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32", attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0]
    return torch.log_softmax(logits.double(), -1)[:-1].numpy()


@pytest.mark.lossless
@pytest.mark.parametrize("mesh", [None, "data=4,model=2"])
def test_scores_are_those_of_transformers(directory, expected, mesh):
    target = load_target(directory, mesh=mesh and make_mesh(parse_mesh(mesh)))
    found, pauses = scores(Engine(target, None, slots=4, max_length=128, prefill_chunk=32))
    assert pauses == 3  # chunks of 32 tokens
    np.testing.assert_allclose(found.logprobs, expected[np.arange(76), PROMPT[1:]], atol=2e-5)
    for top, of_all in zip(found.top, expected, strict=True):
        ids, values = zip(*top, strict=True)
        assert len(ids) == 20
        assert ids[0] == of_all.argmax()
        np.testing.assert_allclose(values, np.sort(of_all)[::-1][:20], atol=2e-5)


@pytest.mark.parametrize("mesh", [None, "data=4,model=2"])
def test_what_is_compiled_in_another_thread_is_not_compiled_again(directory, mesh):
    target = load_target(directory, mesh=mesh and make_mesh(parse_mesh(mesh)))
    engine, compiled = Engine(target, None, slots=4, max_length=96, prefill_chunk=24), []
    listen = lambda event, _, fun_name="", **__: compiled.append(fun_name) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        thread = threading.Thread(target=compile_scores, args=(engine, chunk_of(engine, PROMPT)))
        thread.start()
        thread.join()
        assert compiled.count("jit(_read)") == 1
        scores(engine)  # several chunks
        assert compiled.count("jit(_read)") == 1
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_scores_are_those_of_generated_tokens(directory):
    """And no row of the engine is touched, though they are read between its steps."""
    engine = Engine(load_target(directory), None, slots=1, max_length=128, prefill_chunk=32, logprobs=3)
    request = tiny.ask(PROMPT[:40], 30, logprobs=3)
    (alone,) = engine.generate([request])
    ticket, done, reading = engine.submit(request), None, read_scores(engine, PROMPT[:40] + alone.token_ids)
    while done is None:
        try:
            next(reading)
        except StopIteration as ended:
            done = ended.value
        engine.step()
    assert ticket is not None
    size = len(alone.token_ids)
    np.testing.assert_allclose(done.logprobs[-size:], alone.logprobs, atol=2e-5)
    assert [[token for token, _ in top[:3]] for top in done.top[-size:]] == [
        [token for token, _ in top] for top in alone.top_logprobs
    ]


def test_the_likeliest_token_has_the_very_number_of_the_chosen_one(directory):
    """Clients compare the two for equality to see if a greedy answer would have it."""
    engine = Engine(load_target(directory), None, slots=1, max_length=128)
    (greedy,) = engine.generate([tiny.ask(PROMPT[:9], 12)])
    found, _ = scores(engine, PROMPT[:9] + greedy.token_ids)
    size = len(greedy.token_ids)
    assert found.logprobs[-size:] == [top[0][1] for top in found.top[-size:]]


def test_a_prompt_may_fill_a_row(directory):
    engine = Engine(load_target(directory), None, slots=1, max_length=77, prefill_chunk=32)
    whole, _ = scores(engine)
    half, _ = scores(engine, PROMPT[:40])
    np.testing.assert_allclose(whole.logprobs[:39], half.logprobs, atol=2e-5)
    assert scores(engine, PROMPT[:1]) == (([], []), 0)
