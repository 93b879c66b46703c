"""The command lines: every flag, every form of an argument, and what is said of wrong ones."""

import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys

import pytest

from dflash_jax import __main__ as commands
from dflash_jax import (
    benchmark,
    cli,
    load_drafter,
    load_target,
    pairs,
    plan,
    replay_job,
    serve,
    serve_http,
    terminal,
)
from dflash_jax import commands as answering
from dflash_jax.benchmarks import arguments as measuring
from dflash_jax.benchmarks.hardware import __main__ as hardware
from dflash_jax.bundled import smollm2_drafter
from dflash_jax.cli import EngineOptions, GenerationOptions, ModelOptions
from dflash_jax.engines import engine_config, needs_of
from dflash_jax.infer.interrupt import exit_status
from dflash_jax.models import target_config
from dflash_jax.train import arguments as training
from dflash_jax.train.arguments import parse_stage, settings_given
from dflash_jax.version import __version__
from tests import tiny

# Every flag a user may have in a script, by command.
SERVE = """
    api-key batch-size block-size drafter dtype force http input max-length max-new-tokens max-request-bytes
    allow-unauthenticated max-waiting client-timeout shutdown-timeout host port served-model-name allowed-origins
    log-level no-access-log
    prompt-column max-errors
    mesh min-p no-speculation ordered fields output prefix-chunks processes prompt proposals seed stats-interval
    cache-tokens cache-dtype draft-window verify-budget prefill-budget
    gpu-graphs stream-interval summary target temperature top-k top-p tree
    chat-template-kwargs deterministic kernels ray ray-workers ray-resources
    target-config drafter-config quantize min-tokens ignore-eos stop-token-ids tool-format
    chat-template revision drafter-revision config
"""
MEASURING = """
    batch-size block-size dataset dtype json max-new-tokens max-samples mesh min-p proposals seed target temperature
    top-k top-p tree chat-template-kwargs kernels target-config drafter-config quantize min-tokens ignore-eos
    stop-token-ids tool-format chat-template revision drafter-revision
"""
BENCHMARK = {
    "compare": MEASURING + "drafter official untrained",
    "jobs": MEASURING + "drafter official untrained rounds",
    "sweep": MEASURING + "drafter untrained concurrency plot",
    "drafters": MEASURING + "drafters rounds tasks plot",
}
HARDWARE = "json minutes only pair quantize resume small"


@pytest.mark.parametrize(
    ("parse", "mode", "flags"),
    [
        (serve.parse_options, [], SERVE),
        (hardware.parse_options, [], HARDWARE),
        *((benchmark.parse_options, [mode], flags) for mode, flags in BENCHMARK.items()),
    ],
)
def test_the_flags(parse, mode, flags, capsys):
    with pytest.raises(SystemExit) as done:
        parse([*mode, "--help-all" if parse != hardware.parse_options else "--help"])
    assert done.value.code == 0
    shown = re.findall(r"^[│ ] (?:-h, )?--([a-z][a-z0-9-]*)", capsys.readouterr().out, re.M)
    assert set(shown) == {"help", *flags.split()}
    assert len(shown) == len(set(shown))


@pytest.mark.parametrize("command", "serve,generate,batch,chat,plan,replay,bench compare,train fit".split(","))
def test_the_short_help_shows_what_matters(command, capsys):
    """A dozen options or two, under the name that was typed; the rest with --help-all."""
    with pytest.raises(SystemExit):
        commands.main([*command.split(), "--help"])
    short = capsys.readouterr().out
    assert f"usage: dflash-jax {command}" in short
    assert "--help-all shows all options" in short
    with pytest.raises(SystemExit):
        commands.main([*command.split(), "--help-all"])
    fewer, every = (
        set(re.findall(r"^[│ ] (?:-h, )?--([a-z][a-z0-9-]*)", text, re.M)) for text in (short, capsys.readouterr().out)
    )
    assert {"help", "target"} <= fewer < every
    assert len(fewer) <= 25
    assert "(default: )" not in short


def test_the_help_of_a_subcommand_has_its_own_names(capsys):
    for stage, shown in ("fit", True), ("export", False):
        with pytest.raises(SystemExit):
            commands.main(["train", stage, "--help"])
        assert ("--lr (--learning-rate)" in capsys.readouterr().out) == shown


@pytest.mark.parametrize(
    "module",
    [cli, serve, serve_http, terminal, answering, replay_job, measuring, training],
    ids=lambda one: one.__name__,
)
def test_descriptions_wrap_at_the_edge_of_the_terminal(module):
    """A line of a description that does not begin with a letter would begin a line of the help, too."""
    options = [one for one in vars(module).values() if isinstance(one, type) and dataclasses.is_dataclass(one)]
    assert options
    for one in [*options, *([module.settings_class()] if module is training else [])]:
        what, _, fields = inspect.cleandoc(one.__doc__ or "").partition("Attributes:\n")
        continued = [*what.splitlines()[1:], *(line for line in fields.splitlines() if line.startswith(" " * 8))]
        assert all(line.strip()[:1].isalpha() for line in continued if line.strip()), one


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        (name, flag)
        for name, flag in zip(
            "serve generate generate batch chat".split(),
            "--ordered --http --input --api-key --input".split(),
            strict=True,
        )
    ],
)
def test_commands_have_only_the_options_that_they_use(command, refused, capsys):
    with pytest.raises(SystemExit) as wrong:
        commands.main([command, "--target", "a", refused, "b"])
    assert wrong.value.code == 2
    assert refused in capsys.readouterr().err


def test_names_of_other_tools_are_understood(capsys):
    options = serve.parse_options("--prompt a --model m --draft-model=d --max-tokens 7 --temp 0.5".split())
    assert (options.models.target, options.models.drafter) == ("m", "d")
    assert (options.generation.max_new_tokens, options.generation.temperature) == (7, 0.5)
    assert serve.parse_options("--http h:1 --max-model-len 9 --max-num-seqs 3".split()).engine.max_length == 9
    fitted = parse_stage("fit --target t --data d --output o --lr 0.5".split())
    assert settings_given(fitted.settings) == {"learning_rate": 0.5}
    with pytest.raises(SystemExit):  # names of groups are no flags, and not offered as such
        serve.parse_options(["--prompt", "a", "--modls", "b"])
    assert "nearest is --models" not in capsys.readouterr().err


def test_options_from_a_file(tmp_path, capsys):
    path = tmp_path / "serve.yaml"
    path.write_text(
        "http: 127.0.0.1:1\nmodel: m\nbatch-size: 8\nno_speculation: true\ndeterministic: false\n"
        "chat-template-kwargs: {enable_thinking: false}\nstop-token-ids: [1, 2]\n"
    )
    options = serve.parse_options(["--config", str(path), "--max-num-seqs", "4"])
    assert (options.http, options.models.target, options.generation.batch_size) == ("127.0.0.1:1", "m", 4)
    assert (options.no_speculation, options.engine.deterministic) == (True, False)
    assert options.generation.chat_template_kwargs == {"enable_thinking": False}
    assert options.generation.stop_token_ids == (1, 2)
    path.write_text("no-speculation: 'true'\ndeterministic: 'no'\nforce:\n")
    options = serve.parse_options(["--config", str(path), "--prompt", "a"])
    assert (options.no_speculation, options.engine.deterministic, options.force) == (True, False, False)
    for text, said in {
        "no-speculation: maybe": "no-speculation must be true or false, got 'maybe'",
        "no-speculation: 1": "no-speculation must be true or false, got 1",
        "batch-sise: 8": "nearest is --batch-size",
        "- 1": "a mapping of options",
        "config: x": "has no option --config in a file",
        "a: [": "serve.yaml",
    }.items():
        path.write_text(text)
        with pytest.raises(SystemExit) as wrong:
            serve.parse_options(["--config", str(path), "--prompt", "a"])
        assert wrong.value.code == 2
        assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        serve.parse_options(["--config", str(tmp_path / "none.yaml"), "--prompt", "a"])
    assert "No such file" in capsys.readouterr().err


def test_the_reader_of_the_help_may_leave():
    command = [sys.executable, "-m", "dflash_jax.serve", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_forms_of_arguments():
    job = "--input a b -  --output o --force --ordered --no-speculation --temperature -1 --top-p=0.5".split()
    options = serve.parse_options([*job, "--block-size", "auto"])
    assert options.input == ("a", "b", "-")
    assert options.force
    assert options.ordered
    assert options.no_speculation
    assert (options.generation.temperature, options.generation.top_p) == (-1.0, 0.5)
    assert options.generation.block_size == "auto"
    options = serve.parse_options(["--prompt", "None", "--block-size", "4"])
    assert (options.prompt, options.input, options.models.target) == ("None", None, None)
    assert options.generation.block_size == 4
    assert serve.parse_options(["--http", "localhost:1"]).generation.block_size is None
    options = benchmark.parse_options(["jobs", "--official", "--untrained", "--rounds", "3"])
    assert (options.official, options.untrained, options.rounds) == (True, True, 3)
    options = hardware.parse_options("--minutes 2.5 --only steps,profile --resume".split())
    assert (options.minutes, options.only, options.resume) == (2.5, ("steps", "profile"), True)


def test_wrong_usage_exits_2_and_says_what_to_do(capsys):
    cases = {
        "--temperature": ["--prompt", "a", "--temprature", "1"],
        "not allowed together": ["--prompt", "a", "--http", "h:1"],
        "one of --prompt, --input, --http is required": [],
        "leave out --host and --port": ["--http", "h:1", "--port", "2"],
        "at least one file": ["--input"],
        "number or auto": ["--prompt", "a", "--block-size", "many"],
        "--seed": ["--prompt", "a", "--seed", "x"],
        "invalid choice": ["--prompt", "a", "--proposals", "mine"],
        "must be a JSON object": ["--prompt", "a", "--chat-template-kwargs", "{broken"],
        "got '[1]'": ["--prompt", "a", "--chat-template-kwargs", "[1]"],
        "may not set": ["--prompt", "a", "--chat-template-kwargs", '{"tokenize": true}'],
    }
    for message, arguments in cases.items():
        with pytest.raises(SystemExit) as error:
            serve.main(arguments)
        assert error.value.code == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert message in shown.err


@pytest.mark.parametrize(
    ("command", "arguments", "near"),
    [
        (serve.main, "--promt a", "--prompt"),
        (plan.main, "--topologi v5e:2x2", "--topology"),
        (parse_stage, "fit --lerning-rate 1 --taget x", "--learning-rate"),
        (parse_stage, "fit --lerning-rate 1 --taget x", "--target"),
    ],
)
def test_the_nearest_flag_is_named_where_others_are_missing(command, arguments, near, capsys):
    with pytest.raises(SystemExit) as error:
        command(arguments.split())
    assert error.value.code == 2
    assert f"is unknown; the nearest is {near}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "noted"),
    [
        ("--prompt a --ordered --force --stats-interval nan", ["--force", "--stats-interval", "--ordered"]),
        ("--input a --api-key b", ["--api-key"]),
        ("--http h:1 --ordered --ray", ["--ordered", "--ray"]),
        ("--prompt a --no-speculation --block-size 16", ["--block-size"]),
        ("--input a --ordered --block-size 16", []),
        ('--input a --ray-workers 2 --ray-resources {"GPU":1}', ["--ray-workers", "--ray-resources"]),
        ("--input a --ray --ray-workers 2", []),
    ],
)
def test_flags_without_effect_are_noted(arguments, noted):
    found = serve._without_effect(serve.parse_options(arguments.split()))
    assert [name for name, _ in found] == noted


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ValueError("--x is wrong"), 2, "error: --x is wrong"),
        (FileNotFoundError(2, "No such file or directory", "gone"), 2, "error: gone: No such file or directory"),
        (OSError("the disk is full"), 2, "error: the disk is full"),
        (ImportError("No module named 'a'"), 2, "error: No module named 'a'; pip install a"),
        (KeyboardInterrupt(), 130, "interrupted; nothing is lost"),
    ],
)
def test_what_ends_a_command_is_said(error, status, said, capsys):
    def work():
        raise error

    assert exit_status(work, interrupted="interrupted; nothing is lost", packages="pip install a") == status
    assert capsys.readouterr().err == said + "\n"


def test_libtpu_is_silent_where_there_is_no_tpu(monkeypatch):
    """It is installed here, for the tests that compile for TPUs."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    code = "from dflash_jax.infer.interrupt import exit_status; exit_status(lambda: bool(__import__('jax').devices()))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr == ""


def test_a_result_is_the_status_and_what_a_developer_must_see_passes():
    assert exit_status(lambda: 1) == 1
    with pytest.raises(ImportError):
        exit_status(lambda: importlib.import_module("no_such_package"))


def test_help_needs_no_jax():
    code = (
        "import sys; from dflash_jax import serve, benchmark; from dflash_jax.train.arguments import parse_stage; "
        "serve.parse_options(['--prompt', 'a']); parse_stage(['pair', '--output', 'x']); print('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def config_for(target, requests, generation, options):
    return engine_config(target, needs_of(target.config, requests, options), generation, options)


def test_engines_of_deterministic_jobs_read_prompts_in_chunks_of_one_size(pair):
    target, generation = load_target(pair / "target"), GenerationOptions(block_size="auto")
    for prompt, chunk in ([1] * 5, 32), ([1] * 100, 128), ([1] * 200, 256):
        for deterministic in (False, True):
            options = EngineOptions(deterministic=deterministic)
            config = config_for(target, [tiny.ask(prompt, 5)], generation, options)
            assert config.prefill_chunk == (256 if deterministic else chunk)
            assert config.deterministic == deterministic
            assert (config.max_length == 1024) == deterministic  # what the target was trained for, whoever else asks
    for shared, chunk in (30, 64), (40, 32):  # what many begin with is copied, if it is the larger part
        requests = [tiny.ask([*range(shared), *[50 + i] * 15], 5) for i in range(8)]
        assert config_for(target, requests, generation, EngineOptions()).prefill_chunk == chunk


def test_jobs_of_unlike_requests_share_memory(pair):
    target, generation = load_target(pair / "target"), GenerationOptions(batch_size=16)
    unlike = [tiny.ask([1] * 3, 900), *(tiny.ask([1] * 5, 20) for _ in range(30))]
    config = config_for(target, unlike, generation, EngineOptions())
    assert (config.cache_tokens, config.max_length) == (128 * -(-(903 + 15 * 25 + 16 * 128) // 128), 1024)
    given = config_for(target, unlike, generation, EngineOptions(cache_tokens=5000))
    assert (given.cache_tokens, given.max_length) == (5000, 903)
    assert config_for(target, unlike[1:], generation, EngineOptions()).cache_tokens is None
    assert config_for(target, unlike, generation, EngineOptions(deterministic=True)).cache_tokens is None


def test_tokens_show_as_often_as_is_asked(pair, capsys):
    target, generation = load_target(pair / "target"), GenerationOptions()
    for options, steps in (EngineOptions(), 16), (EngineOptions(stream_interval=2), 2):
        assert config_for(target, [tiny.ask([1], 5)], generation, options).steps_per_visit == steps
    models = ["--target", str(pair / "target"), "--drafter", str(pair / "drafter")]
    assert serve.main([*models, "--prompt", "a", "--stream-interval", "0"]) == 2
    assert "--stream-interval must be at least 1" in capsys.readouterr().err


def test_the_kernels_are_chosen_before_anything_is_loaded(pair, monkeypatch, capsys):
    from dflash_jax.kernels import dispatch

    chosen = []
    monkeypatch.setattr(dispatch, "set_policy", chosen.append, raising=False)
    models = ["--target", str(pair / "target"), "--no-speculation", "--max-new-tokens", "2"]
    assert serve.main([*models, "--prompt", "a"]) == 0
    assert chosen == []
    assert serve.main([*models, "--prompt", "a", "--kernels", "xla"]) == 0
    assert chosen == ["xla"]
    with pytest.raises(SystemExit):
        serve.main([*models, "--prompt", "a", "--kernels", "mine"])


def test_the_commands_are_listed(capsys):
    assert commands.main([]) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^  {name} ", listed, re.M) for name in commands.COMMANDS)
    assert commands.main(["serv"]) == 2
    assert "has no command 'serv'" in capsys.readouterr().err
    assert commands.main(["--version"]) == 0
    assert capsys.readouterr().out == f"dflash-jax {__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("dflash-jax b", ["batch", "bench"]),
        ("dflash-jax serve --temp", ["--temperature"]),
        ("dflash-jax train exp", ["export"]),
        ("dflash-jax bench sw", ["sweep"]),
        ("dflash-jax bench sweep --conc", ["--concurrency"]),
        ("dflash-jax train fit --init-fr", ["--init-from"]),
        ("dflash-jax chat --sys", ["--system"]),
        ("dflash-jax serve fil", []),
    ],
)
def test_words_are_completed(words, expected, capsys):
    """By the script, in a real shell."""
    assert commands.main(["completion"]) == 0
    ask = (
        f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; _dflash_jax; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", capsys.readouterr().out + ask], capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected


def test_completion_knows_the_settings_of_every_kind_of_drafter():
    """In a process of its own, where nothing else has imported the kinds."""
    run = [sys.executable, "-m", "dflash_jax", "completion"]
    assert " --markov-rank " in subprocess.run(run, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("plain", [False, True])
def test_the_installed_model_speculates_with_its_drafter(monkeypatch, tmp_path, plain):
    monkeypatch.setattr("dflash_jax.bundled.installed_model", lambda: tmp_path / "smol.gguf")
    chosen = pairs.completed(ModelOptions(), speculative=not plain)
    assert chosen.target == str(tmp_path / "smol.gguf")
    assert chosen.drafter == (None if plain else str(smollm2_drafter()))


def test_a_published_target_gets_its_drafter(capsys):
    assert pairs.completed(ModelOptions(target="Qwen/Qwen3-8B")).drafter == "z-lab/Qwen3-8B-DFlash-b16"
    assert "drafter: z-lab/Qwen3-8B-DFlash-b16, made for this target" in capsys.readouterr().err
    assert pairs.completed(ModelOptions(target=pairs.SMOLLM2)).drafter == str(smollm2_drafter())
    for models, speculative in [
        (ModelOptions(target="Qwen/Qwen3-8B", drafter="mine"), True),
        (ModelOptions(target="Qwen/Qwen3-8B"), False),
        (ModelOptions(target="./Qwen/Qwen3-8B"), True),
    ]:
        assert pairs.completed(models, speculative=speculative) == models


def test_a_drafter_names_its_target(tmp_path, capsys):
    written = {
        "base": {"base_model_name_or_path": "Qwen/Qwen3-8B"},
        "ours": {"target_model_name_or_path": "Qwen/Qwen3-8B"},
        "speculators": {"speculators_config": {"verifier": {"name_or_path": "Qwen/Qwen3-8B"}}},
    }
    for name, config in written.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        for drafter in (str(tmp_path / name), f"ngram+{tmp_path / name}", "z-lab/Qwen3-8B-DFlash-b16"):
            assert pairs.completed(ModelOptions(drafter=drafter)).target == "Qwen/Qwen3-8B"
    assert "which the drafter was made for" in capsys.readouterr().err
    (tmp_path / "base" / "config.json").write_text('{"speculators_config": {"verifier": {"name_or_path": null}}}')
    with pytest.raises(ValueError, match="names no target; give one with --target"):
        pairs.completed(ModelOptions(drafter=str(tmp_path / "base")))


def test_the_drafter_of_smollm2():
    """It fits the model, in the size that it is run at, and is small."""
    drafter = load_drafter(smollm2_drafter(), dtype="float32")
    shape = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3}
    drafter.config.check_pair(target_config(tiny.target_config(vocab_size=49152, **shape)))
    assert (smollm2_drafter() / "model.safetensors").stat().st_size <= 25_000_000


@pytest.mark.slow
def test_the_bundled_pair_says_what_it_is(monkeypatch, capsys):
    monkeypatch.setattr("dflash_jax.bundled.installed_model", lambda: None)
    assert serve.main(["--prompt", "hi", "--max-new-tokens", "2", "--block-size", "4"]) == 0
    said = capsys.readouterr().err
    assert "for testing only" in said
    assert "--target Qwen/" in said
