"""Figures of a server: histograms and counters for Prometheus, the dashboard that shows them, lines of the log."""

import json
import logging
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dflash_jax.infer.engine.requests import Completion
from dflash_jax.infer.engine.stats import Stats
from dflash_jax.infer.http.figures import Figures, StatusLine

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana.json"
DONE = Completion(
    token_ids=list(range(12)),
    finish_reason="stop",
    acceptance_lengths=[4, 1, 4, 2],
    proposed_tokens=28,
    submitted=1.0,
    started=1.5,
    first_token=3.0,
    finished=8.5,
)


class Fake:
    """An engine whose figures are set by hand."""

    slots, busy, waiting, drafter = 4, 3, 1, "a drafter"
    batch, drafts = SimpleNamespace(pages=SimpleNamespace(available=640)), SimpleNamespace(auto=True)

    def __init__(self):
        self.stats, self.steps_by_block_size = Stats(), {"1": 0, "16": 0}


def samples(figures):
    families = text_string_to_metric_families(generate_latest(figures.registry).decode())
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_finished_request_is_counted_with_its_times():
    figures = Figures(Fake())
    figures.finished(DONE)
    figures.finished(Completion(token_ids=[1], finish_reason="length", submitted=1.0, started=1.0, first_token=1.2))
    found = samples(figures)
    assert found["dflash_requests_total", "stop"] == found["dflash_requests_total", "length"] == 1
    assert found["dflash_generated_tokens_total",] == 13
    assert figures.tau == 11 / 4
    for name, seconds in (("queue_time", 0.5), ("time_to_first_token", 2.2)):
        assert found[f"dflash_{name}_seconds_count",] == 2
        assert found[f"dflash_{name}_seconds_sum",] == pytest.approx(seconds)
    # The time for each token after the first, of those requests that have one.
    assert found["dflash_time_per_output_token_seconds_count",] == 1
    assert found["dflash_time_per_output_token_seconds_sum",] == pytest.approx(5.5 / 11)
    assert found["dflash_queue_time_seconds_bucket", "0.25"] == 1
    assert found["dflash_queue_time_seconds_bucket", "0.5"] == 2
    assert found["dflash_e2e_request_latency_seconds_bucket", "7.5"] == 2
    # Of four steps, the first place was right in three, the third in two.
    place = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [found[place, str(i)] for i in range(3)] == [3, 2, 2]


def test_what_the_engine_counts_is_told_as_counters():
    figures = Figures(engine := Fake())
    engine.stats.prompt_tokens, engine.stats.prefix_tokens = 10, 4
    engine.steps_by_block_size = {"1": 3, "16": 5}
    figures.worked()
    engine.stats.prompt_tokens, engine.stats.preempted = 25, 1
    engine.steps_by_block_size = {"1": 1, "16": 9}  # counted anew where programs were timed again
    figures.worked()
    found = samples(figures)
    assert found["dflash_prompt_tokens_total",] == 25
    assert found["dflash_prompt_tokens_copied_total",] == 4
    assert found["dflash_requests_preempted_total",] == 1
    assert found["dflash_draft_steps_total", "1"] == 3
    assert found["dflash_draft_steps_total", "16"] == 9
    assert (found["dflash_slots",], found["dflash_slots_busy",], found["dflash_requests_waiting",]) == (4, 3, 1)
    assert found["dflash_cache_tokens_free",] == 640


def test_the_dashboard_asks_for_what_there_is():
    figures = Figures(engine := Fake())
    engine.steps_by_block_size = {"16": 1}
    figures.worked()
    figures.finished(DONE)
    there = {name for name, *_ in samples(figures)}
    labels = {"position", "draft", "finish_reason", "le", "instance"}
    board = json.loads(DASHBOARD.read_text())
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    found = set()
    for expression in asked:
        names = set(re.findall(r"[a-z_:0-9]+(?=\{)", expression))
        assert names, expression
        found |= names
        assert set(re.findall(r"by \((\w+)\)", expression)) <= labels
        counters = re.findall(r"rate\(([a-z_:0-9]+)", expression)
        assert all(name.endswith(("_total", "_bucket")) for name in counters), expression
        assert expression.count("(") == expression.count(")")
    assert found <= there, found - there
    for histogram in (name for name in there if name.endswith("_bucket")):
        assert histogram in found, "no panel shows it"
    places = [tuple(panel["gridPos"][side] for side in "xywh") for panel in board["panels"]]
    cells = Counter((x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h))
    assert max(cells.values()) == 1
    assert max(x for x, _ in cells) == 23


def test_lines_of_the_log_come_while_there_is_work(caplog):
    caplog.set_level(logging.INFO, "dflash_jax")
    engine, now = Fake(), [100.0]
    status = StatusLine(engine, 5.0, lambda: now[0])

    def work(seconds, tokens=0, steps=0, prompt=0, **drafts):
        now[0] += seconds
        engine.stats.decode_tokens += tokens
        engine.stats.row_steps += steps
        engine.stats.prompt_tokens += prompt
        for name, count in drafts.items():
            engine.steps_by_block_size[name.removeprefix("b")] += count
        status.worked()

    now[0] = 1000.0  # a long time without any work
    status.resumed()
    work(2.0, tokens=40, steps=10, prompt=100, b16=9, b1=1)
    assert not caplog.records
    work(3.0, tokens=20, steps=10, b16=9, b1=1)
    line = "running 3, waiting 1, prompts 20.0 tokens/s, answers 12.0 tokens/s, tau 3.00, auto runs block size 16"
    assert [record.getMessage() for record in caplog.records] == [line]
    work(4.0, tokens=10, steps=10, b1=10)
    now[0] += 500.0
    status.resumed()
    work(1.0, tokens=5, steps=5, b1=5)  # what no line has told of yet is told, by the time that there was work
    assert caplog.messages[1].endswith("answers 3.0 tokens/s, tau 1.00, auto runs no speculation")
    assert len(caplog.records) == 2
    engine.drafter = None
    work(6.0, tokens=12, steps=12, b16=12)
    assert caplog.messages[2].endswith("answers 2.0 tokens/s")
