"""The stages on the command line, one after another, as a user would run them."""

import errno
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from dflash_jax import load_drafter
from dflash_jax.benchmarks import planning
from dflash_jax.infer.engine.params import SamplingParams
from dflash_jax.infer.engine.requests import Completion, Request
from dflash_jax.infer.engine.slots import Slots
from dflash_jax.infer.jobs import journal
from dflash_jax.infer.jobs.lines import Line
from dflash_jax.infer.progress import duration
from dflash_jax.pairs import target_of
from dflash_jax.train import evaluate, fit
from dflash_jax.train.__main__ import main
from dflash_jax.train.arguments import parse_stage, settings_given
from dflash_jax.train.regenerate import answer_record
from dflash_jax.train.run import Run
from tests import tiny

SETTINGS = "--length 64 --anchors 16 --batch-size 2 --block-size 4 --num-layers 1 --epochs 4 --log-every 2".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stages")
    tiny.write_target(directory / "target", tiny.target_config())
    tiny.write_tokenizer(directory / "target")
    words = ["hello there", "what is it", "one two", "abc", "zz top", "more"]
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": word}) + "\n" for word in words))
    return directory


def regenerate(place, name="answers.jsonl", *more):
    arguments = ["--target", str(place / "target"), "--input", str(place / "prompts.jsonl"), "--max-new-tokens", "30"]
    return main(["regenerate", *arguments, "--output", str(place / name), "--batch-size", "2", *more])


@pytest.mark.slow
def test_the_stages(place, capsys, monkeypatch):
    assert regenerate(place) == 0
    answers = place / "answers.jsonl"
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(6))
    for row in rows:
        assert len(row["loss_mask"]) == len(row["prompt_token_ids"]) + len(row["response_token_ids"])
        assert sum(row["loss_mask"]) == len(row["response_token_ids"])
    models, data = ["--target", str(place / "target")], ["--data", str(answers)]
    assert main(["cache-features", *models, *data, *SETTINGS, "--output", str(place / "features")]) == 0
    run, prompts = str(place / "run"), str(place / "prompts.jsonl")
    fit = ["fit", *models, *data, *SETTINGS, "--features", str(place / "features"), "--output", run]
    told = []
    tracker = SimpleNamespace(
        init=lambda **given: told.append(given),
        log=lambda values, step: told.append(step),
        finish=lambda: told.append("end"),
    )
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    more = ["--evaluate-prompts", prompts, "--evaluate-max-new-tokens", "8", "--tensorboard", run, "--tracker", "wandb"]
    assert main([*fit, *more]) == 0
    assert told[0]["name"] == "run"
    assert told[0]["config"]["block_size"] == 4
    assert told[-1] == "end"
    assert len(told) > 2
    monkeypatch.delitem(sys.modules, "wandb")  # transformers looks at its spec
    said = capsys.readouterr()
    assert re.search(r"^\d+ optimizer steps of 2 sequences of 64 tokens: [\d,]+ tokens, [\d.]+ epochs$", said.err, re.M)
    assert re.search(r"^\d+ steps done, loss [\d.]+, best tau [\d.]+ on held-out prompts, after step \d+; ", said.out)
    assert said.out.endswith(f"next: dflash-jax train export --run {run} --output DIR\n")
    assert main(fit) == 0
    assert re.search(r"^all \d+ steps are done$", capsys.readouterr().err, re.M)
    figures = place / "figures.json"
    evaluation = ["evaluate", *models, "--run", run, "--prompts", prompts, "--max-new-tokens", "8"]
    assert main([*evaluation, "--json", str(figures)]) == 0
    assert json.loads(figures.read_text())["equal_outputs"] == 6
    said = capsys.readouterr()
    assert "tau" in said.out
    assert "12/12" in said.err  # six answers with the drafter and six without it
    assert main(["export", "--run", run, "--output", str(place / "drafter"), "--dtype", "float32"]) == 0
    assert load_drafter(place / "drafter").config.mask_token_id == tiny.MASK
    other = ["export", "--run", run, "--output", str(place / "other"), "--dtype", "float32", "--format", "speculators"]
    assert main(other) == 0
    assert load_drafter(place / "other").config == load_drafter(place / "drafter").config
    how = '\n    vllm serve target --speculative-config \'{"model": "DIR", "num_speculative_tokens": 3}\'\n'
    assert how in (place / "other" / "README.md").read_text()  # a target that only lies here has no name in vLLM
    for exported in ("drafter", "other"):
        assert target_of(str(place / exported)) == str(place / "target")
    written = (place / "drafter" / "README.md").read_text()
    assert "# A dflash drafter for target" in written
    assert str(place) not in written
    assert "| training step | tau on held-out prompts |" in written
    assert "It proposes 3 tokens a step" in written
    assert "base_model" not in written  # a directory is none of the hub's
    evaluation = ["evaluate", *models, "--drafter", str(place / "drafter"), "--prompts", prompts, "--store-sharpness"]
    for wrong in ([], ["--temperature", "1", "--proposals", "coupled"]):
        assert main([*evaluation, *wrong]) == 2
        assert "--store-sharpness needs a --temperature" in capsys.readouterr().err
    assert load_drafter(place / "drafter").config.proposal_sharpness == ()
    assert main([*evaluation, "--temperature", "1", "--max-new-tokens", "20"]) == 0
    stored = load_drafter(place / "drafter").config
    assert len(stored.proposal_sharpness) == stored.block_size - 1
    assert "sharpness by depth" in capsys.readouterr().out
    assert main(["plot", "--run", run, "--output", str(place / "plot.png")]) == 0


def test_the_time_left_does_not_count_the_compilation(monkeypatch, capsys):
    """It follows from the speed of the steps after the first."""
    told = {"steps_per_second": 0.2, "loss": 1.25}
    run = object.__new__(Run)
    run.steps, run.state = 10, SimpleNamespace(step=0)
    monkeypatch.setattr(Run, "fit", lambda self, report: report(2, told))
    fit._train(run, [])
    shown = capsys.readouterr().err
    assert "compiling" in shown
    assert "2/10" in shown
    assert "40 s left loss 1.250" in shown


@pytest.mark.parametrize(("seconds", "shown"), [(41.6, "42 s"), (60, "1 min"), (3000, "50 min"), (9000, "2.5 h")])
def test_times_in_words(seconds, shown):
    assert duration(seconds) == shown


def test_anchors_of_an_answer():
    line = Line(0, "a", Request([5, 6, 7], SamplingParams(8)))
    done = Completion([1, 2, 3, 4, 5, 6, 7], "length", acceptance_lengths=[3, 1, 2])
    assert answer_record(line, [done])["anchors"] == [3, 6, 7]
    done.acceptance_lengths = []
    assert "anchors" not in answer_record(line, [done])


@pytest.mark.slow
def test_answers_say_where_steps_began(place, tmp_path):
    """Decoding with a drafter changes no answer, and training goes on where its steps began."""
    drafter = tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config())
    assert regenerate(place, "plain.jsonl") == 0
    assert regenerate(place, "decoded.jsonl", "--drafter", str(drafter)) == 0
    plain, decoded = (
        {row["index"]: row for row in map(json.loads, (place / name).read_text().splitlines())}
        for name in ("plain.jsonl", "decoded.jsonl")
    )
    for index, row in decoded.items():
        anchors = row.pop("anchors")
        assert row == plain[index]
        prompt, size = len(row["prompt_token_ids"]), len(row["loss_mask"])
        assert anchors[0] == prompt
        assert anchors[-1] < size - 1
        assert all(0 < b - a <= 8 for a, b in zip(anchors, [*anchors[1:], size - 1], strict=True))
    data = ["--data", str(place / "decoded.jsonl"), "--anchor-placement", "decoded"]
    fit = ["fit", "--target", str(place / "target"), "--output", str(tmp_path / "run"), *data]
    fit += ["--init-from", str(drafter)]
    assert main([*fit, "--length", "64", "--batch-size", "2", "--max-steps", "2"]) == 0


@pytest.mark.slow
def test_an_official_eagle_drafter_is_continued(place, tmp_path):
    """Its config does not say which layers it taps; what is saved does."""
    deep = tiny.write_target(tmp_path / "target", tiny.target_config(num_hidden_layers=8))
    official = {"architectures": ["LlamaForCausalLMEagle3"], "num_target_layers": 8}
    raw = tiny.kinds()["eagle3.1"] | official
    del raw["target_layer_ids"]
    started = tiny.write_drafter(tmp_path / "official", raw)
    del raw["num_target_layers"]
    (started / "config.json").write_text(json.dumps(raw))
    tiny.write_tokenizer(deep)
    models, answers = ["--target", str(deep)], tmp_path / "answers.jsonl"
    answers.write_text('{"prompt_token_ids": [1, 4], "response_token_ids": [2, 3, 4, 9, 8, 7, 6, 5, 4, 3]}\n' * 2)
    run = ["fit", *models, "--data", str(answers), "--init-from", str(started), "--output", str(tmp_path / "run")]
    assert main([*run, "--length", "16", "--anchors", "8", "--batch-size", "1", "--max-steps", "1"]) == 0
    evaluation = ["evaluate", *models, "--prompts", str(place / "prompts.jsonl"), "--max-new-tokens", "8"]
    assert main([*evaluation, "--drafter", str(started), "--max-samples", "2"]) == 0
    export = ["export", "--run", str(tmp_path / "run"), "--output", str(tmp_path / "new")]
    assert main([*export, "--dtype", "float32"]) == 0
    assert load_drafter(tmp_path / "new").taps == (1, 3, 4)
    assert planning._parsed((tiny.target_config(num_hidden_layers=8), raw))[1].target_layer_ids == (1, 3, 4)


def test_regenerating_continues(place, capsys):
    assert regenerate(place, "torn.jsonl", "--temperature", "0.7") == 0
    whole = (place / "torn.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (place / "torn.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    assert regenerate(place, "torn.jsonl", "--temperature", "0.7") == 0
    assert "3 lines done, 3 left" in capsys.readouterr().err
    assert sorted((place / "torn.jsonl").read_text().splitlines()) == sorted(whole.splitlines())
    assert regenerate(place, "torn.jsonl", "--temperature", "0.8") == 2
    assert "temperature 0.7, now 0.8" in capsys.readouterr().err
    prompts = (place / "prompts.jsonl").read_text()
    (place / "prompts.jsonl").write_text('{"prompt": "else"}\n' * 6)
    assert regenerate(place, "torn.jsonl", "--temperature", "0.7") == 2
    assert "other settings: input 6 lines" in capsys.readouterr().err
    (place / "prompts.jsonl").write_text(prompts)
    (place / "torn.jsonl").write_text("no record\n" + whole)
    assert regenerate(place, "torn.jsonl", "--temperature", "0.7") == 2
    assert "damaged" in capsys.readouterr().err


def test_an_interrupt_ends_regenerating(place, monkeypatch, capsys):
    """While programs are compiled, and while it waits for room on a full disk: one is enough in either."""
    signals = []

    def interrupt(*_):
        assert not signals, "it went on"
        signals.append(os.kill(os.getpid(), signal.SIGTERM))

    for patch in ((Slots, "begin", interrupt), (journal.time, "sleep", interrupt)):
        signals.clear()
        with monkeypatch.context() as patched:
            patched.setattr(*patch)
            patched.setattr(journal, "open_locked", lambda path, wait: Full(path, "ab"))
            assert regenerate(place, "stopped.jsonl") == 130
        assert signals
        assert "the same command continues" in capsys.readouterr().err
    assert regenerate(place, "stopped.jsonl") == 0
    assert len((place / "stopped.jsonl").read_text().splitlines()) == 6


class Full(io.FileIO):
    """A file on a full disk."""

    def write(self, data):
        raise OSError(errno.ENOSPC, "no space")


def test_unusable_arguments_exit_2(place, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"prompt_token_ids": [1], "response_token_ids": []}\n')
    models, data = ["--target", str(place / "target")], ["--data", str(tmp_path / "data.jsonl")]
    (tmp_path / "good.jsonl").write_text('{"prompt_token_ids": [1], "response_token_ids": [2, 3, 4]}\n')
    good = ["--data", str(tmp_path / "good.jsonl"), "--length", "16"]
    fine = ["fit", *models, *good, "--output", str(tmp_path / "never")]
    tiny.write_drafter(tmp_path / "d", tiny.drafter_config())
    cases = {
        "nothing to train on": ["fit", *models, *data, "--output", str(tmp_path / "run")],
        "without effect for a dflash drafter: markov_rank": [
            "fit",
            *models,
            *data,
            "--output",
            "x",
            "--markov-rank",
            "8",
        ],
        "unknown settings": ["fit", *models, *data, "--output", "x", "--config", str(tmp_path / "c.yaml")],
        "No such file": ["fit", *models, "--data", str(tmp_path / "gone"), "--output", "x"],
        "drafter.json": ["export", "--run", str(tmp_path), "--output", str(tmp_path / "new")],
        "exists; choose": ["export", "--run", str(tmp_path), "--output", str(tmp_path)],
        "evaluate_every needs": ["fit", *models, *good, "--output", str(tmp_path / "r"), "--evaluate-every", "3"],
        "--init-from decides mask": [*fine, "--init-from", str(tmp_path / "d"), "--mask-token-id", "3"],
        "above the drafter's 8": [*fine, "--init-from", str(tmp_path / "d"), "--block-size", "9"],
        "either --run or --drafter": ["evaluate", *models, "--prompts", "x"],
        "needs --drafter, a directory": ["evaluate", *models, "--prompts", "x", "--run", "y", "--store-sharpness"],
        "that `fit` wrote": ["plot", "--run", str(tmp_path), "--output", str(tmp_path / "p.png")],
    }
    (tmp_path / "c.yaml").write_text("lr: 3\n")
    for message, arguments in cases.items():
        assert main(arguments) == 2, message
        assert message in capsys.readouterr().err
    wrong = {
        "regenerate, cache-features": ["train"],
        "block_size must be int, got 'many'": [*fine, "--block-size", "many"],
        "--learning-rate": [*fine, "--learning-rat", "1"],
        "one of adamw, muon": [*fine, "--optimizer", "sgd"],
        "takes one HOST:PORT": [*fine, "--distributed", "a:1,0/2", "b"],
        "--target": ["fit", *data, "--output", "x"],
    }
    for message, arguments in wrong.items():
        with pytest.raises(SystemExit) as error:
            main(arguments)
        assert error.value.code == 2
        assert message in capsys.readouterr().err


# Every flag a user may have in a script, by stage.
SETTINGS_FLAGS = """
    accumulate anchor-placement anchors b1 b2 batch-size block-size clip-norm cross-entropy dtype epochs
    evaluate-every evaluate-max-new-tokens evaluate-samples evaluate-temperature feature-noise
    final-learning-rate gamma keep kl learning-rate length log-every loss-chunk mask-token-id max-steps
    num-layers optimizer remat row-anchors save-every schedule seed target-layer-ids total-variation warmup
    weight-decay weighting drafter draft-vocab-size conv-group-size selector-rank selector-top-k markov-rank
    lilicorr-candidate-topk lilicorr-hidden-size lilicorr-num-layers lilicorr-num-heads lilicorr-mlp-ratio
    lilicorr-factor-dim lilicorr-logit-scale conv-kernel-size
    markov-head-type negative-log-acceptance lk-hybrid moments round-logit-gradients
"""
DATA = (
    "config data distributed init-from kernels mesh output target target-config drafter-config quantize "
    + SETTINGS_FLAGS
)
GENERATION = """
    batch-size block-size drafter dtype max-new-tokens mesh min-p proposals target temperature top-k top-p tree
    chat-template-kwargs kernels target-config drafter-config quantize min-tokens ignore-eos stop-token-ids tool-format
    chat-template revision drafter-revision
"""
FLAGS = {
    "regenerate": GENERATION
    + "input output seed max-length prefix-chunks deterministic gpu-graphs stream-interval "
    + "cache-tokens cache-dtype draft-window verify-budget prefill-budget",
    "cache-features": DATA + "hidden",
    "fit": DATA + "features evaluate-prompts chat-template-kwargs tensorboard tracker",
    "evaluate": GENERATION + "prompts run step max-samples json store-sharpness",
    "export": "dtype output run step license data-name format",
    "push": "drafter repo private",
    "plot": "output run",
    "pair": "output",
    "ablate": "output pair plot rows samples steps",
}


@pytest.mark.parametrize("stage", FLAGS)
def test_the_flags(stage, capsys):
    with pytest.raises(SystemExit) as done:
        main([stage, "--help-all"])
    assert done.value.code == 0
    shown = re.findall(r"^[│ ] (?:-h, )?--([a-z][a-z0-9-]*)", capsys.readouterr().out, re.M)
    assert set(shown) == {"help", *FLAGS[stage].split()}
    assert len(shown) == len(set(shown))


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("", {}),
        ("--remat false", {"remat": False}),
        ("--learning-rate 6e-4 --epochs 2", {"learning_rate": 6e-4, "epochs": 2.0}),
        ("--target-layer-ids [0,2]", {"target_layer_ids": (0, 2)}),
        ("--target-layer-ids 0 2", {"target_layer_ids": (0, 2)}),
        ("--mask-token-id 4095", {"mask_token_id": 4095}),
        ("--mask-token-id null", {"mask_token_id": None}),  # given, though it is the default
        ("--block-size 16", {"block_size": 16}),
    ],
)
def test_settings_on_the_command_line(arguments, given):
    options = parse_stage(["fit", "--target", "t", "--data", "d", "--output", "o", *arguments.split()])
    assert settings_given(options.settings) == given


def test_distributed_takes_a_value_or_none():
    fit = ["fit", "--target", "t", "--data", "d", "--output", "o"]
    for more, found in ([], None), (["--distributed"], ""), (["--distributed", "h:1,0/2"], "h:1,0/2"):
        assert parse_stage([*fit, *more, "--seed", "1"]).source.distributed == found


@pytest.mark.slow
def test_a_full_disk_keeps_the_last_good_checkpoint(place, tmp_path):
    """In a process of its own: a failed write leaves coroutines of orbax behind, which warn in whatever runs next."""
    answers, run = tmp_path / "answers.jsonl", tmp_path / "run"
    answers.write_text('{"prompt_token_ids": [1, 4], "response_token_ids": [2, 3, 4, 9, 8, 7, 6, 5, 4, 3]}\n' * 100)
    command = [sys.executable, "-m", "dflash_jax.train", "fit", "--target", str(place / "target")]
    command += ["--data", str(answers), *SETTINGS, "--length", "16", "--save-every", "20", "--output", str(run)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        while process.poll() is None and not (run / "checkpoints" / "20").exists():
            time.sleep(0.02)
        # From here on every file ends in the middle of a checkpoint.
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
        _, error = process.communicate(timeout=600)
    assert process.returncode == 2, error
    last = error.splitlines()[-1]
    assert re.match(r"error: the checkpoint of step \d+ could not be written; .*File too large", last), error
    assert "Traceback" not in error
    kept = max(int(name) for name in os.listdir(run / "checkpoints") if name.isdigit())
    assert 20 <= kept < 200
    logged = (run / "metrics.jsonl").read_text().splitlines()[: kept // 2]  # with the times of the first process
    subprocess.run(command, capture_output=True, check=True)
    whole = (run / "metrics.jsonl").read_text().splitlines()
    assert whole[: kept // 2] == logged
    assert json.loads(whole[-1])["step"] == 200


@pytest.mark.slow
def test_regenerating_notes_the_arguments_of_the_chat_template(place, capsys):
    (place / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "abc"}]}\n')
    given = ["--input", str(place / "chat.jsonl"), "--deterministic"]
    unthinking = ["--chat-template-kwargs", '{"enable_thinking": false}']
    assert regenerate(place, "chat-answers.jsonl", *given, *unthinking) == 0
    noted = json.loads((place / "chat-answers.jsonl.settings.json").read_text())
    assert noted["chat_template_kwargs"] == {"enable_thinking": False}
    fixed = {"block_size": None, "tree": None, "batch_size": 2, "proposals": "calibrated", "drafter": None}
    assert noted["deterministic"] == fixed
    assert regenerate(place, "chat-answers.jsonl", *given) == 2
    assert "chat_template_kwargs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tau", "speedup", "shown"), [(2.5, 1.2, "tau 2.500   speedup 1.20"), (2.5, None, "not known")]
)
def test_an_evaluation_is_printed(tau, speedup, shown, monkeypatch, capsys):
    print_evaluation(tau, speedup, monkeypatch)
    assert shown in capsys.readouterr().out


def test_an_evaluation_whose_answers_end_at_once_says_so(monkeypatch, capsys):
    print_evaluation(None, None, monkeypatch)
    assert "no steps were taken: every answer to the 3 prompts ended" in capsys.readouterr().out


def print_evaluation(tau, speedup, monkeypatch):
    """The stage `evaluate` with these figures."""
    figures = {"tau": tau, "speedup": speedup, "samples": 3, "acceptance_per_position": [0.5] if tau else []}
    monkeypatch.setattr(evaluate, "_pair", lambda options: (None, None))
    monkeypatch.setattr(evaluate, "read_prompts", lambda *given: [])
    monkeypatch.setattr(evaluate, "evaluate", lambda *given, **options: dict(figures))
    options = parse_stage(["evaluate", "--target", "t", "--drafter", "d", "--prompts", "p"])
    assert evaluate.main(options) == 0
