"""Throughput against interactivity: what is counted, and what is read off."""

import json
from types import SimpleNamespace

import pytest

from dflash_jax import Engine, benchmark
from dflash_jax.benchmarks import turns
from dflash_jax.benchmarks.plots import plot_sweep
from dflash_jax.benchmarks.sweep import at_fixed_interactivity, text
from dflash_jax.benchmarks.turns import Turns, side_by_side
from dflash_jax.infer.engine.requests import Completion
from tests.tiny import ask


class Steady(Engine):
    """An engine that gives every request a token a step, a second each on the clock of the test, until it has three."""

    def __init__(self, clock, seconds=1.0):
        self.clock, self.seconds, self.open, self.most, self.given = clock, seconds, {}, 0, 0

    def submit(self, request):
        self.given += 1
        self.open[self.given] = Completion(acceptance_lengths=[1, 1])
        self.most = max(self.most, len(self.open))
        return self.given

    def step(self, *, admit=True):
        self.clock.now += self.seconds
        for answer in self.open.values():
            answer.token_ids.append(1)
            answer.finish_reason = "length" if len(answer.token_ids) == 3 else ""
        events = list(self.open.items())
        self.open = {ticket: answer for ticket, answer in self.open.items() if not answer.finish_reason}
        return events

    def wait(self):
        pass


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock.now)
    return clock


def test_turns_count_on_a_clock_of_their_own(clock):
    fast, slow = Steady(clock), Steady(clock, seconds=4.0)
    found = side_by_side({"fast": fast, "slow": slow}, [ask([1])] * 6, in_flight=2)
    assert fast.most == slow.most == 2
    for name, seconds in (("fast", 1.0), ("slow", 4.0)):
        one = found[name]
        assert sorted(one.answers) == list(range(6))
        assert (one.tokens, one.seconds) == (18, 9 * seconds)
        assert one.tokens_per_second == pytest.approx(2 / seconds)
        assert one.tokens_per_second_and_user == pytest.approx(1 / seconds)
        assert one.first_token_seconds(99) == pytest.approx(seconds)
        assert one.tau == 1


def test_all_requests_are_submitted_unless_it_is_said_how_many(clock):
    engine = Steady(clock)
    one = Turns(engine, [ask([1])] * 4)
    while one.left:
        one.take()
    assert engine.most == 4
    assert one.first_token_seconds(50) == 1


def rows(**engines):
    return [
        {
            "engine": name,
            "concurrency": 2**i,
            "tokens_per_second_and_user": user,
            "tokens_per_second": total,
            "first_token_p50": 0.1,
            "first_token_p99": 0.2,
            "tau": None,
        }
        for name, points in engines.items()
        for i, (user, total) in enumerate(points)
    ]


def test_the_most_at_no_less_interactivity(tmp_path):
    found = rows(autoregressive=[(10, 10), (8, 32), (None, 5)], block=[(30, 30), (9, 36), (2, 40)])
    user = "tokens_per_second_and_user"
    assert at_fixed_interactivity(found, "autoregressive") == [
        {user: 10, "autoregressive": 10, "block": 30},
        {user: 8, "autoregressive": 32, "block": 36},
    ]
    assert at_fixed_interactivity(found, "block")[0] == {user: 30, "autoregressive": None, "block": 30}
    assert "36.0" in text({"sweep": found})
    plot_sweep(found, tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_sweep(pair, tmp_path, capsys):
    models = ["--target", str(pair / "target"), "--drafter", str(pair / "drafter"), "--max-new-tokens", "8"]
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "number {i}", "category": "c{i % 2}"}}\n' for i in range(4)))
    files = ["--dataset", str(data), "--json", str(tmp_path / "f.json")]
    assert benchmark.main(["sweep", *models, *files, "--concurrency", "1,2", "--plot", str(tmp_path / "p.svg")]) == 0
    found = json.loads((tmp_path / "f.json").read_text())["sweep"]
    assert [(row["concurrency"], row["engine"]) for row in found] == [
        (n, name) for n in (1, 2) for name in ("autoregressive", "block 8", "auto")
    ]
    assert all(0 < row["first_token_p50"] <= row["first_token_p99"] for row in found)
    assert (tmp_path / "p.svg").stat().st_size > 1000
    assert "no fewer tokens/s and user" in capsys.readouterr().out
    assert benchmark.main(["compare", *models, *files]) == 0
    categories = json.loads((tmp_path / "f.json").read_text())["acceptance_by_category"]
    assert {name: one["samples"] for name, one in categories.items()} == {"c0": 2, "c1": 2}
    assert "tau by category" in capsys.readouterr().out


def test_wrong_sweeps_are_refused(capsys):
    for arguments, named in (
        (["sweep", "--concurrency", "1,x"], "like 1,2,4"),
        (["compare", "--plot", "a.svg"], "sweep --help"),  # which has this option
    ):
        with pytest.raises(SystemExit) as done:
            benchmark.main(arguments)
        assert done.value.code == 2
        assert named in capsys.readouterr().err
