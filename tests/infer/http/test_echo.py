"""Lists of prompts, and completions that begin with their prompt, as evaluations ask for them."""

import json
import threading

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from starlette.testclient import TestClient

from dflash_jax import Engine, SamplingParams, load_drafter, load_target
from dflash_jax.infer.http.server import Worker, make_app
from dflash_jax.infer.text import Text
from tests import tiny

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tiny.write_target(tmp_path_factory.mktemp("echo"), tiny.target_config())
    tiny.write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def text(directory):
    return Text(str(directory))


@pytest.fixture(scope="module")
def worker(directory, tmp_path_factory):
    drafter = load_drafter(tiny.write_drafter(tmp_path_factory.mktemp("drafter"), tiny.drafter_config()))
    worker = Worker(Engine(load_target(directory), drafter, slots=2, max_length=128, logprobs=20, prefill_chunk=32))
    worker.start()
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def ask(worker, text):
    with TestClient(make_app(worker, text, SamplingParams(8), model="tiny", api_key=None)) as client:

        def ask(status=200, **body):
            answer = client.post(PATH, json=body)
            assert answer.status_code == status, answer.text
            return answer.json() if status == 200 else answer.json()["error"]

        ask.stream = lambda **body: [
            json.loads(line[6:])
            for line in client.post(PATH, json=body | {"stream": True}).text.splitlines()
            if line.startswith("data: {")
        ]
        yield ask


@pytest.mark.parametrize("prompts", [["abc", "hello there", "x"], [[1, 2, 3], [4], [5, 6]]])
def test_a_list_of_prompts_is_answered_in_its_order(ask, prompts):
    alone = [ask(prompt=prompt, n=2, seed=3, temperature=1.0) for prompt in prompts]
    together = ask(prompt=prompts, n=2, seed=3, temperature=1.0)
    assert [choice["index"] for choice in together["choices"]] == list(range(6))
    expected = [choice["text"] for one in alone for choice in one["choices"]]
    assert [choice["text"] for choice in together["choices"]] == expected
    for name in ("prompt_tokens", "completion_tokens"):
        assert together["usage"][name] == sum(one["usage"][name] for one in alone)
    events = ask.stream(prompt=prompts, n=2, seed=3, temperature=1.0, stream_options={"include_usage": True})
    texts = [""] * 6
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == expected
    # What was copied from an earlier prompt is another number each time.
    assert {k: v for k, v in events[-1]["usage"].items() if k in together["usage"] and k.endswith("tokens")} == {
        k: v for k, v in together["usage"].items() if k.endswith("tokens")
    }


def test_prompts_of_a_list_without_a_seed_draw_noise_of_their_own(ask):
    found = ask(prompt=["abc"] * 4, temperature=1.0, max_tokens=20)
    assert len({choice["text"] for choice in found["choices"]}) > 1


def test_a_wrong_prompt_of_a_list_is_refused(ask):
    for prompts in (["abc", 5], [[1], {}], [[1], [10**6]], ["abc", "a" * 300], ["abc", ""]):
        assert ask(400, prompt=prompts)["type"] == "invalid_request_error"
    assert "1024 answers" in ask(400, prompt=["a"] * 600, n=2)["message"]


def test_the_log_probabilities_of_a_prompt(ask, text, directory):
    """As lm-eval asks for them: it drops the token that is generated, and looks whether each token is the likeliest."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32", attn_implementation="eager")
    prompts = [[5, 9, 20, 3, 11], list(range(1, 60)), [7, tiny.EOS, 8]]
    found = ask(prompt=prompts, max_tokens=1, echo=True, logprobs=1, seed=1234, temperature=0)
    for prompt, choice in zip(prompts, found["choices"], strict=True):
        with torch.no_grad():
            scores = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1).numpy()
        given, tops = choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]
        assert len(given) == len(tops) == len(choice["logprobs"]["tokens"]) == len(prompt) + 1
        assert (given[0], tops[0]) == (None, None)
        expected = scores[np.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(given[1:-1], expected, atol=2e-5)
        greedy = [max(top.values()) == one for one, top in zip(given[1:-1], tops[1:-1], strict=True)]
        assert greedy == (scores[:-1].argmax(-1) == prompt[1:]).tolist()
        assert choice["text"].startswith(text.decode(prompt))
    generated = ask(prompt=prompts[0], max_tokens=1, logprobs=1)["choices"][0]["logprobs"]["token_logprobs"]
    assert found["choices"][0]["logprobs"]["token_logprobs"][-1:] == pytest.approx(generated, abs=1e-5)


def test_nothing_is_generated_if_no_token_is_asked_for(ask, worker):
    before = worker.figures.registry.get_sample_value("dflash_generated_tokens_total")
    found = ask(prompt=["abc", "abcd"], max_tokens=0, echo=True, logprobs=2)
    assert [choice["text"] for choice in found["choices"]] == ["abc", "abcd"]
    assert [choice["finish_reason"] for choice in found["choices"]] == ["length", "length"]
    assert [len(choice["logprobs"]["tokens"]) for choice in found["choices"]] == [3, 4]
    assert all(len(top) == 2 for top in found["choices"][1]["logprobs"]["top_logprobs"][1:])
    assert found["usage"] | {"prompt_tokens_details": 0} == {
        "prompt_tokens": 7,
        "completion_tokens": 0,
        "total_tokens": 7,
        "prompt_tokens_details": 0,
    }
    assert worker.figures.registry.get_sample_value("dflash_generated_tokens_total") == before


def test_an_echo_without_log_probabilities(ask):
    plain = ask(prompt="abc", n=2, seed=1, temperature=1.0)["choices"]
    echoed = ask(prompt="abc", n=2, seed=1, temperature=1.0, echo=True)["choices"]
    assert [choice["text"] for choice in echoed] == ["abc" + choice["text"] for choice in plain]
    assert [choice["logprobs"] for choice in echoed] == [None, None]


@pytest.mark.parametrize(
    "body",
    [
        {"echo": True, "stream": True},
        {"echo": "yes"},
        {"max_tokens": 0},
        {"max_tokens": False, "echo": True},
        {"echo": True, "logprobs": 21},
    ],
    ids=str,
)
def test_what_is_refused(ask, body):
    assert ask(400, prompt="abc", **body)["type"] == "invalid_request_error"


def test_others_are_answered_while_the_program_is_compiled(ask, worker, monkeypatch):
    compiling, go_on, scored = threading.Event(), threading.Event(), []

    def slow(engine, chunk):
        compiling.set()
        assert go_on.wait(300)

    monkeypatch.setattr("dflash_jax.infer.http.worker.compile_scores", slow)
    monkeypatch.setattr(worker, "_scorable", set())
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    waiting = threading.Thread(target=lambda: scored.append(ask(**body)))
    waiting.start()
    assert compiling.wait(300)
    assert ask(prompt="abc")["usage"]["completion_tokens"] == 8
    assert not scored
    go_on.set()
    waiting.join()
    assert scored[0]["choices"][0]["text"] == "abc"


def test_a_prompt_that_cannot_be_scored_fails_alone(ask, monkeypatch):
    def broken(engine, prompt):
        raise MemoryError("no room for it")
        yield

    monkeypatch.setattr("dflash_jax.infer.http.worker.read_scores", broken)
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 0}
    assert ask(500, **body)["code"] == "engine_failed"
    assert ask(prompt="abc")["usage"]["completion_tokens"] == 8
