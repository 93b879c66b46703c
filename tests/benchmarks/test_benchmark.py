"""The benchmark's figures are complete and consistent; its datasets are formatted as the official ones."""

import json
import sys
from types import SimpleNamespace

import pytest

from dflash_jax import benchmark
from dflash_jax.benchmarks import jobs
from dflash_jax.benchmarks.pairs import Asked
from dflash_jax.benchmarks.step_times import SAMPLES, samples_due
from dflash_jax.data.datasets import SOURCES, Sample, load_dataset, training_prompts
from dflash_jax.infer.engine.chooser import Draft
from dflash_jax.infer.engine.engine import Engine


@pytest.fixture
def pair(pair):
    return ["--target", str(pair / "target"), "--drafter", str(pair / "drafter")]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", pytest.param("1", marks=pytest.mark.exhaustive)])
def test_figures(pair, tmp_path, capsys, temperature):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"turns": ["hello there"]}\n{"prompt": "and again"}\n{"question": "why?"}\n')
    arguments = ["--dataset", str(data), "--max-new-tokens", "16", "--temperature", temperature]
    arguments += ["--chat-template-kwargs", '{"enable_thinking": false}']
    assert benchmark.main(["compare", *pair, *arguments, "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["equal_outputs"] == figures["samples"] == 3
    speculative, plain = figures["speculative"], figures["autoregressive"]
    assert speculative["tokens"] == plain["tokens"] == plain["steps"]
    assert figures["tau"] == pytest.approx(speculative["tokens"] / speculative["steps"])
    assert sum(k * n for k, n in enumerate(figures["acceptance_histogram"])) == speculative["tokens"]
    assert figures["speedup"] == pytest.approx(speculative["tokens_per_second"] / plain["tokens_per_second"])
    parts = {"draft", "verify", "accept", "commit", "parts in turn"}
    assert set(figures["step_seconds"]) == {"autoregressive", "speculative", *parts}
    assert all(value > 0 for value in figures["step_seconds"].values())
    assert ("argmax_proposals" in figures) == (temperature == "1")
    assert figures["chat_template_kwargs"] == {"enable_thinking": False}
    assert "speedup" in capsys.readouterr().out


@pytest.mark.parametrize("turns", [1, 2, 9, 10, 400])
def test_the_times_of_a_step_are_spread_over_a_run(turns):
    due = [samples_due(turn, turns) for turn in range(turns)]
    assert sum(due) == SAMPLES
    assert max(due) - min(due) <= 1
    assert due[-1] > 0


@pytest.mark.slow
def test_jobs_of_every_block_size_take_turns(pair, tmp_path, capsys):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(f'{{"prompt": "number {i}"}}\n' for i in range(4)))
    arguments = ["--dataset", str(data), "--max-new-tokens", "8", "--batch-size", "2", "--rounds", "2", "--untrained"]
    assert benchmark.main(["jobs", *pair, *arguments, "--json", str(tmp_path / "figures.json")]) == 0
    sides = json.loads((tmp_path / "figures.json").read_text())["engines"]
    single = ["one at a time, autoregressive", "one at a time"]
    assert list(sides) == ["autoregressive", "block 4", "block 8", "auto", *single]
    assert sides["autoregressive"]["ratio"] == sides["autoregressive"]["lower_bound"] == 1
    assert all(0 < side["lower_bound"] <= side["ratio"] for side in sides.values())
    assert 1 <= sides["block 8"]["tau"] < 2  # nothing is right but by chance
    assert sum(sides["auto"]["steps_by_block_size"].values()) > 0
    assert "at least" in capsys.readouterr().out


class Idle(Engine):
    def __init__(self):
        self.choosers = self.shared = {2: None}

    def warm_up(self):
        pass


class IdlePair(Asked):
    def engine(self, generation, options, *, speculative=True):
        return Idle()


def test_an_engine_that_could_speculate_and_does_not():
    """What its drafter's state costs is measured: whatever its choosers would have chosen, it decodes plainly. They are
    replaced where they are, for an engine's parts share them."""
    drafter = SimpleNamespace(config=SimpleNamespace(block_size=8))
    options = benchmark.parse_options(["jobs", "--block-size", "auto"])
    named = jobs.engines(IdlePair(None, drafter, "", (), (), None, {}), options)
    assert list(named) == ["autoregressive", "auto", "draft state kept, unused"]
    assert named["auto"].choosers == {2: None}
    assert named["draft state kept, unused"].shared[2].choose(["a request"]) == Draft(1)


def test_official_needs_greedy_batch_one(pair, capsys):
    for arguments in (["compare"], ["jobs"], ["compare", "--batch-size", "2"]):
        temperature = [] if "--batch-size" in arguments else ["--temperature", "1"]
        assert benchmark.main([*arguments, *pair, "--official", *temperature]) == 2
        assert "greedy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("--max-samples 3", "compare --max-samples 3"),
        ("--jobs 3 --block-size auto", "jobs --block-size auto --rounds 3"),
        ("--rounds 9 --jobs=3", "jobs --rounds 9 --rounds 3"),  # it was the number of rounds of --drafters alone
        ("--seed 1 --sweep 1,2 --plot a.svg", "sweep --seed 1 --plot a.svg --concurrency 1,2"),
        ("--temperature 0,1 --drafters a=b", "drafters --temperature 0,1 --drafters a=b"),
    ],
)
def test_commands_without_a_mode_still_work(before, now, capsys):
    options = benchmark.parse_options(before.split())
    assert capsys.readouterr().err == f"note: this is now written as: python -m dflash_jax.benchmark {now}\n"
    assert options == benchmark.parse_options(now.split())
    assert capsys.readouterr().err == ""


def test_compare_is_the_default(capsys):
    assert benchmark.parse_options([]) == benchmark.parse_options(["compare"])
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_degenerate_runs_are_refused(pair, tmp_path, capsys):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "a"}')
    cases = {"max_samples": ["--max-samples", "0"], "drafts no tokens": ["--block-size", "1"]}
    for message, arguments in (cases | {"nothing was decoded": ["--max-new-tokens", "1"]}).items():
        assert benchmark.main(["compare", *pair, "--dataset", str(data), *arguments]) == 2
        assert message in capsys.readouterr().err


def test_local_datasets_are_asked_by_their_name(tmp_path):
    rows = [json.dumps({"question": f"q{i}"}) for i in range(30)]
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("\n".join(rows))
    everything = load_dataset(str(path))
    assert len(everything) == 30
    assert everything[0].turns[0].endswith("\nPlease reason step by step, and put your final answer within \\boxed{}.")
    assert load_dataset(str(path), 4) == everything[:4]  # the shuffle does not depend on the count
    assert [sample.turns[0][:3] for sample in everything] != [f"q{i}\n"[:3] for i in range(30)]
    other = tmp_path / "mine.jsonl"
    other.write_text('{"turns": ["one", "two"]}')
    assert load_dataset(str(other)) == [Sample(["one", "two"])]


def test_prepared_files_of_speed_bench(tmp_path):
    """Rows as its card and NVIDIA's script have them: made here, nothing of it is shipped."""
    path, user = tmp_path / "qualitative.jsonl", {"role": "user", "content": "one"}
    row = {
        "question_id": "1",
        "category": "coding",
        "sub_category": "x",
        "source": "s",
        "src_id": "3",
        "multiturn": True,
    }
    messages = [user, {"role": "assistant", "content": "no"}, {"role": "user", "content": "two"}]
    rows = [row | {"turns": ["one", "two"]}, row | {"messages": messages}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert load_dataset(str(path)) == [Sample(["one", "two"], "coding")] * 2
    path.write_text(json.dumps(row | {"turns": ["one\u2028\u0085", "two"]}, ensure_ascii=False) + "\r\n", "utf-8")
    assert load_dataset(str(path)) == [Sample(["one\u2028\u0085", "two"], "coding")]
    rows.append(row | {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]})
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match="line 3.*prepare the file"):
        load_dataset(str(path))


def test_training_prompts_of_a_named_set(monkeypatch, tmp_path):
    asked = []

    def load(*path, split):
        asked.append((path, split))
        return [{"question": "2 + 2?", "answer": "4"}, {"question": "1 + 1?", "answer": "2"}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    rows = [json.loads(line) for line in training_prompts("gsm8k")]
    assert asked == [(("openai/gsm8k", "main"), "train")]  # never the questions of the benchmark
    assert [row["messages"][0]["content"].split("\n")[0] for row in rows] == ["2 + 2?", "1 + 1?"]
    (tmp_path / "own.jsonl").write_text('{"prompt": "abc"}\n')
    with training_prompts(str(tmp_path / "own.jsonl")) as file:
        assert json.loads(file.readline()) == {"prompt": "abc"}


def test_bad_datasets_are_named(tmp_path):
    with pytest.raises(ValueError, match="gsm8k"):
        load_dataset("gsm9k")
    with pytest.raises(ValueError, match="does not exist"):
        load_dataset(str(tmp_path / "gone.jsonl"))
    path = tmp_path / "bad.jsonl"
    for text in ("{", "[]", '{"answer": 3}', '{"turns": []}', '{"turns": [3]}'):
        path.write_text('{"prompt": "fine"}\n' + text)
        with pytest.raises(ValueError, match="line 2"):
            load_dataset(str(path))
    path.write_text("")
    with pytest.raises(ValueError, match="no rows"):
        load_dataset(str(path))
    assert {"gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench"} == set(SOURCES)
