"""What clients learn of a server whose engine failed: that it did. What happened stands in the log."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from starlette.testclient import TestClient

from dflash_jax import SamplingParams
from dflash_jax.infer.http.server import Worker, make_app
from dflash_jax.infer.text import Text
from tests import tiny

SECRET = "no such file: the-private-directory"


class BrokenEngine:
    """An engine that takes requests and fails at its first step."""

    slots, max_length, busy, waiting, left = 1, 64, 0, 0, 0
    target = SimpleNamespace(dtype=np.dtype("float32"), params={})
    config, constraints = SimpleNamespace(plain=False), None
    drafter, drafts, block_size = None, SimpleNamespace(auto=False, block_sizes=(1,)), 1

    def check_settings(self, request):
        pass

    def submit(self, request):
        self.waiting = 1
        return 0

    def cancel(self, ticket):
        pass

    def step(self, *, admit=True):
        raise RuntimeError(SECRET)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    directory = tiny.write_target(tmp_path_factory.mktemp("target"), tiny.target_config())
    tiny.write_tokenizer(directory)
    return Text(str(directory))


@pytest.mark.parametrize("streamed", [False, True])
def test_nobody_is_told_the_text_of_an_exception(text, streamed, caplog):
    worker = Worker(BrokenEngine())  # type: ignore[arg-type]
    worker.start()
    app = make_app(worker, text, SamplingParams(4), model="tiny", api_key=None)
    with TestClient(app, raise_server_exceptions=False) as client:
        assert client.get("/health").status_code == 200
        body = {"prompt": "abc", "stream": streamed}
        asked = [client.post("/v1/completions", json=body) for _ in range(2)]  # at the failure, and after it
        after = client.get("/health")
    worker.stop()
    assert [answer.status_code for answer in asked] == [200 if streamed else 500, 500]
    assert after.status_code == 500
    assert json.loads(after.text)["error"]["code"] == "engine_failed"
    for answer in (*asked, after):
        assert "the server's log says why" in answer.text
        assert SECRET not in answer.text
    assert sum(SECRET in (record.exc_text or "") for record in caplog.records) == 1
