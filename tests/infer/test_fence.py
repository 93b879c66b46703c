"""Whatever a line or a request provokes ends as its own error, and stops no other."""

import json
from types import SimpleNamespace

import pytest

from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Completion, RequestError
from dflash_jax.infer.http.server import Service
from dflash_jax.infer.jobs import records
from dflash_jax.infer.jobs.answering import Answering
from dflash_jax.infer.jobs.lines import read_lines
from dflash_jax.infer.openai import TEXT
from dflash_jax.infer.text import Text

PROVOKED = [
    RecursionError("deep"),
    TypeError("kind"),
    IndexError("place"),
    KeyError("name"),
    OverflowError("size"),
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogate"),
    AttributeError("line\nline"),
]


class Provoked(Text):
    """A tokenizer that one text brings down."""

    def __init__(self, error):
        super().__init__("")
        self.error = error

    def encode(self, prompt):
        if prompt == "bad":
            raise self.error
        return [1, 2]


@pytest.mark.parametrize("error", PROVOKED, ids=repr)
def test_a_line_ends_as_its_record(error):
    raw = [json.dumps({"id": name, "prompt": name}).encode() for name in ("good", "bad", "other")]
    good, bad, other = read_lines(raw, Provoked(error), SamplingParams())
    assert good.request
    assert other.request
    assert bad.error
    record = records.error_record(bad)
    assert record["id"] == "bad"
    assert record["error"]["code"] == "invalid_request"


@pytest.mark.parametrize("error", PROVOKED, ids=repr)
def test_a_request_ends_as_4xx(error):
    service = object.__new__(Service)
    service._text, service._defaults, service._model = Provoked(error), SamplingParams(), "m"
    service._worker = SimpleNamespace(engine=SimpleNamespace(check_settings=lambda request: None))
    assert len(service._read(b'{"prompt": "good"}', TEXT).samples) == 1
    with pytest.raises(RequestError) as failed:
        service._read(b'{"prompt": "bad"}', TEXT)
    assert failed.value.code == "invalid_request"


@pytest.mark.parametrize("error", PROVOKED, ids=repr)
def test_a_finished_line_whose_record_cannot_be_made_stops_no_other(error):
    lines = read_lines(
        [b'{"id": "bad", "prompt": "x"}', b'{"id": "good", "prompt": "x"}'], Provoked(error), SamplingParams()
    )

    def record(line, answers):
        if line.id == "bad":
            raise error
        return {"id": line.id}

    done = Completion()
    done.finish_reason = "stop"
    tickets = iter(range(9))
    engine = SimpleNamespace(submit=lambda request: next(tickets), step=lambda admit: [(0, done), (1, done)])
    answering = Answering(engine, record)
    assert not [event for line in lines for event in answering.add(line)]
    (bad, _), (good, _) = answering.step(admit=True)
    assert bad["error"]["code"] == "invalid_request"
    assert good == {"id": "good"}
