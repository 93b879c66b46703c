"""The stages on the command line, one after another, as a user would run them."""

import json

import pytest

from dflash_jax import load_drafter
from dflash_jax.train.__main__ import main
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


def test_the_stages(place, capsys):
    assert regenerate(place) == 0
    answers = place / "answers.jsonl"
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert sorted(row["index"] for row in rows) == list(range(6))
    for row in rows:
        assert len(row["loss_mask"]) == len(row["prompt_token_ids"]) + len(row["response_token_ids"])
        assert sum(row["loss_mask"]) == len(row["response_token_ids"])
    models, data = ["--target", str(place / "target")], ["--data", str(answers)]
    assert main(["cache-features", *models, *data, *SETTINGS, "--out", str(place / "features")]) == 0
    run, prompts = str(place / "run"), str(place / "prompts.jsonl")
    fit = ["fit", *models, *data, *SETTINGS, "--features", str(place / "features"), "--out", run]
    assert main([*fit, "--eval-prompts", prompts, "--evaluate-max-new-tokens", "8", "--tensorboard", run]) == 0
    assert '"tau"' in capsys.readouterr().out
    figures = place / "figures.json"
    evaluation = ["evaluate", *models, "--run", run, "--prompts", prompts, "--max-new-tokens", "8"]
    assert main([*evaluation, "--json", str(figures)]) == 0
    assert json.loads(figures.read_text())["equal_outputs"] == 6
    assert "tau" in capsys.readouterr().out
    assert main(["export", "--run", run, "--out", str(place / "drafter"), "--dtype", "float32"]) == 0
    assert load_drafter(place / "drafter").config.mask_token_id == tiny.MASK
    assert main(["plot", "--run", run, "--out", str(place / "plot.png")]) == 0


def test_regenerating_continues(place, capsys):
    assert regenerate(place, "torn.jsonl", "--temperature", "0.7") == 0
    whole = (place / "torn.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (place / "torn.jsonl").write_text("".join(lines[:3]) + lines[3][:20])
    assert regenerate(place, "torn.jsonl", "--temperature", "0.7") == 0
    assert "3 lines are done, 3 left" in capsys.readouterr().err
    assert sorted((place / "torn.jsonl").read_text().splitlines()) == sorted(whole.splitlines())
    assert regenerate(place, "torn.jsonl", "--temperature", "0.8") == 2
    assert "temperature 0.7, now 0.8" in capsys.readouterr().err
    prompts = (place / "prompts.jsonl").read_text()
    (place / "prompts.jsonl").write_text('{"prompt": "else"}\n' * 6)
    assert regenerate(place, "torn.jsonl", "--temperature", "0.7") == 2
    assert "answers other prompts" in capsys.readouterr().err
    (place / "prompts.jsonl").write_text(prompts)
    (place / "torn.jsonl").write_text("rubbish\n" + whole)
    assert regenerate(place, "torn.jsonl", "--temperature", "0.7") == 2
    assert "damaged" in capsys.readouterr().err


def test_unusable_arguments_exit_2(place, tmp_path, capsys):
    (tmp_path / "data.jsonl").write_text('{"prompt_token_ids": [1], "response_token_ids": []}\n')
    models, data = ["--target", str(place / "target")], ["--data", str(tmp_path / "data.jsonl")]
    (tmp_path / "good.jsonl").write_text('{"prompt_token_ids": [1], "response_token_ids": [2, 3, 4]}\n')
    good = ["--data", str(tmp_path / "good.jsonl"), "--length", "16"]
    fine = ["fit", *models, *good, "--out", str(tmp_path / "never")]
    tiny.write_drafter(tmp_path / "d", tiny.drafter_config())
    cases = {
        "nothing to train on": ["fit", *models, *data, "--out", str(tmp_path / "run")],
        "unknown settings": ["fit", *models, *data, "--out", "x", "--config", str(tmp_path / "c.yaml")],
        "block_size must be": ["fit", *models, *data, "--out", "x", "--block-size", "many"],
        "No such file": ["fit", *models, "--data", str(tmp_path / "gone"), "--out", "x"],
        "drafter.json": ["export", "--run", str(tmp_path), "--out", str(tmp_path / "new")],
        "exists; choose": ["export", "--run", str(tmp_path), "--out", str(tmp_path)],
        "evaluate_every needs": ["fit", *models, *good, "--out", str(tmp_path / "r"), "--evaluate-every", "3"],
        "--init-from decides mask": [*fine, "--init-from", str(tmp_path / "d"), "--mask-token-id", "3"],
        "above the drafter's 8": [*fine, "--init-from", str(tmp_path / "d"), "--block-size", "9"],
        "either --run or --drafter": ["evaluate", *models, "--prompts", "x"],
        "that `fit` wrote": ["plot", "--run", str(tmp_path), "--out", str(tmp_path / "p.png")],
    }
    (tmp_path / "c.yaml").write_text("lr: 3\n")
    for message, arguments in cases.items():
        assert main(arguments) == 2, message
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit) as error:
        main(["train"])
    assert error.value.code == 2
