"""The command lines: every flag, every form of an argument, and what is said of wrong ones."""

import importlib
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from dflash_jax import __main__ as commands
from dflash_jax import benchmark, load_drafter, load_target, plan, serve
from dflash_jax.benchmarks.hardware import __main__ as hardware
from dflash_jax.bundled import smollm2_drafter
from dflash_jax.cli import EngineOptions, GenerationOptions
from dflash_jax.engines import engine_config, needs_of
from dflash_jax.infer.interrupt import exit_status
from dflash_jax.models import target_config
from dflash_jax.train.arguments import parse_stage
from tests import tiny

# Every flag a user may have in a script, by command.
SERVE = """
    api-key batch-size block-size drafter dtype force http input max-length max-new-tokens max-request-bytes
    allow-unauthenticated max-waiting client-timeout shutdown-timeout host port served-model-name allowed-origins
    log-level no-access-log
    mesh min-p no-speculation ordered output prefix-chunks processes prompt proposals seed stats-interval
    cache-tokens cache-dtype draft-window verify-budget prefill-budget
    gpu-graphs stream-interval summary target temperature top-k top-p tree
    chat-template-kwargs deterministic kernels ray ray-workers ray-resources
    target-config drafter-config quantize min-tokens ignore-eos stop-token-ids tool-format
    chat-template revision drafter-revision
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
        parse([*mode, "--help"])
    assert done.value.code == 0
    shown = re.findall(r"^[│ ] (?:-h, )?--([a-z][a-z0-9-]*)", capsys.readouterr().out, re.M)
    assert set(shown) == {"help", *flags.split()}
    assert len(shown) == len(set(shown))


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
    assert all(re.search(rf"^  {name} ", listed, re.M) for name in ("serve", "benchmark", "train", "plan"))
    assert commands.main(["serv"]) == 2
    assert "takes no 'serv'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("python -m dflash_jax.b", ["dflash_jax.benchmark"]),
        ("python -m dflash_jax.serve --temp", ["--temperature"]),
        ("python -m dflash_jax.train exp", ["export"]),
        ("python -m dflash_jax.benchmark sw", ["sweep"]),
        ("python -m dflash_jax.benchmark sweep --conc", ["--concurrency"]),
        ("python -m dflash_jax.train fit --init-fr", ["--init-from"]),
        ("python -m http.server --", []),
        ("python -m dflash_jax.serve fil", []),
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
    chosen = serve._with_default_models(replace(serve.ServeOptions(), no_speculation=plain))
    assert chosen.models.target == str(tmp_path / "smol.gguf")
    assert chosen.models.drafter == (None if plain else str(smollm2_drafter()))


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
