"""Text into tokens and back, over HTTP."""

import json

import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from dflash_jax.infer.text import Text
from tests import tiny
from tests.infer.http.test_entrance import client_of


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tiny.write_target(tmp_path_factory.mktemp("text"), tiny.target_config())
    tiny.write_tokenizer(directory)
    return Text(str(directory))


def test_tokens_and_their_text(text):
    messages = [{"role": "user", "content": "hello"}]
    with client_of(text, api_key="k") as client:
        assert client.post("/tokenize", json={"prompt": "abc"}).status_code == 401
        client.headers["authorization"] = "Bearer k"
        found = client.post("/tokenize", json={"model": "m", "prompt": "hello", "add_special_tokens": True}).json()
        assert found == {"count": 5, "tokens": text.encode("hello"), "max_model_len": 64}
        assert client.post("/tokenize", json={"messages": messages}).json()["tokens"] == text.encode_chat(messages)
        plain = client.post("/tokenize", json={"prompt": "hello", "add_special_tokens": False}).json()
        assert plain["tokens"] == text.encode_rendered("hello")
        assert client.post("/detokenize", json={"tokens": found["tokens"]}).json()["prompt"] == "hello"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": []}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/tokenize", {"prompt": "a", "colour": 1}),
        ("/tokenize", {"messages": 5}),
        ("/tokenize", []),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [2**40]}),
        ("/detokenize", {"prompt": "a"}),
    ],
    ids=str,
)
def test_what_is_refused(text, path, body):
    with client_of(text) as client:
        answer = client.post(path, content=json.dumps(body))
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_target_without_a_tokenizer():
    with client_of() as client:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            assert client.post(path, json=body).json()["error"]["code"] == "no_tokenizer"
