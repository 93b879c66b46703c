"""Compiled programs kept on disk: the same answers, and never another program's."""

import dataclasses
import os
import shutil
import subprocess
import sys

import jax
import pytest

from dflash_jax import Engine, load_drafter
from dflash_jax.bundled import PROMPT
from dflash_jax.infer.engine import executables, programs
from dflash_jax.kernels import dispatch, verdicts, verify
from tests import tiny
from tests.fakes.drafters import BigramDrafter

PROMPTS = [[5, 9, 11], [7, 7, 30, 31, 2], [40]]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(executables, "enabled", lambda: True)
    monkeypatch.setattr(verify, "_known", {})  # other tests have kernels that fail their checks
    monkeypatch.setattr(verify, "_undecided", set())
    return tmp_path / "dflash_jax" / "programs"


def engine(target, drafter, **settings):
    return Engine(target, drafter, **{"slots": 2, "max_length": 64, "prefill_chunk": 32} | settings)


def answers(engine):
    engine.warm_up()
    requests = [tiny.ask(prompt, 12, temperature=0.7 * i, id=str(i)) for i, prompt in enumerate(PROMPTS)]
    return [(done.token_ids, done.acceptance_lengths) for done in engine.generate(requests)]


def path(engine):
    calls, name = engine.batch.calls, engine.batch.calls.names[0]
    return executables.path_of(calls.empty(name, engine.batch.state), calls._options(name))


def test_the_next_process_traces_nothing_and_answers_alike(target, drafter, directory, monkeypatch):
    with monkeypatch.context() as off:
        off.setattr(executables, "enabled", lambda: False)
        expected = answers(engine(target, drafter))
        assert not directory.exists()
    assert answers(engine(target, drafter)) == expected
    assert len(list(directory.iterdir())) == 3  # two shapes of prompts, one draft
    jax.clear_caches()  # as if in another process

    def unused(*arguments, **given):
        raise AssertionError("traced again")

    monkeypatch.setattr(programs, "run", unused)
    monkeypatch.setattr(programs, "commit_prompts", unused)
    assert answers(engine(target, drafter)) == expected


def test_what_a_program_follows_from_is_in_its_name(target, drafter, directory, monkeypatch, tmp_path):
    first = engine(target, drafter)
    assert path(first) == path(engine(target, drafter, seed=3))  # a seed is an argument
    names = {path(first)}

    def differs(one):
        name = path(one)
        assert name not in names
        names.add(name)

    differs(engine(target, drafter, max_length=96))
    differs(engine(target, drafter, slots=3))
    differs(engine(target, drafter, block_size=3))
    differs(engine(target, drafter, tree=5))
    differs(engine(target, drafter, logprobs=2))
    differs(engine(target, None))
    changed = dataclasses.replace(target.config, rms_norm_eps=1e-3)
    differs(engine(target.replace(config=changed), drafter))
    differs(engine(target, load_drafter(tiny.write_drafter(tmp_path / "other", tiny.drafter_config(rope_theta=77.0)))))
    with jax.default_matmul_precision("highest"):
        differs(first)
    dispatch.set_policy("xla")
    try:
        differs(first)
    finally:
        dispatch.set_policy(None)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    differs(first)
    monkeypatch.setattr(executables, "_sources", lambda: "other sources")
    differs(first)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(verdicts, "_processor", lambda: "x86_64 sse2")
        differs(first)
    before = jax.config.jax_log_compiles
    jax.config.update("jax_log_compiles", not before)
    assert path(first) in names
    jax.config.update("jax_log_compiles", before)
    monkeypatch.setattr(first.batch.calls, "compiler_options", lambda draft, rows: {"xla_some_option": True})
    differs(first)


def test_code_from_outside_is_not_kept(target, drafter, directory, monkeypatch):
    made = engine(target, BigramDrafter(64))
    assert path(made) is None
    assert not directory.exists()
    answers(made)
    monkeypatch.setattr("dflash_jax.models.qwen3.__name__", "my_notebook")  # the family of `target`
    assert path(engine(target, drafter)) is None


@pytest.mark.slow
def test_damaged_files_are_written_again(target, drafter, directory):
    expected = answers(engine(target, drafter))
    whole = [b"", b"half", next(directory.iterdir()).read_bytes()[:1000]]
    for file, damaged in zip(directory.iterdir(), whole, strict=True):
        file.write_bytes(damaged)
    jax.clear_caches()
    assert answers(engine(target, drafter)) == expected
    files = {file: file.stat().st_ino for file in directory.iterdir()}
    assert len(files) == 3
    jax.clear_caches()
    assert answers(engine(target, drafter)) == expected
    assert {file: file.stat().st_ino for file in directory.iterdir()} == files


def test_what_jax_found_in_its_own_cache_is_compiled_afresh(target, drafter, directory, monkeypatch):
    """What was read cannot be written again: functions would be missing."""
    compile, compiled = jax.stages.Lowered.compile, []

    def found(lowered, *given, **options):
        compiled.append(lowered.as_text().split("@jit_")[1].split()[0])
        if compiled[-1].count("_") == 1:
            jax.monitoring.record_event(executables.FOUND)
        return compile(lowered, *given, **options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", found)
    assert answers(engine(target, drafter))
    large = [name for name in compiled if name.startswith(("decode_", "prefill_"))]
    assert sorted(name.count("_") for name in large) == [1, 1, 1, 2, 2, 2]
    assert len(list(directory.iterdir())) == 3


@pytest.mark.parametrize("fails", ["serialize", "replaced", "full"])
def test_where_none_can_be_written_that_of_jax_serves(target, drafter, directory, monkeypatch, fails):
    def refuse(*given):
        raise OSError("not on this platform, or the disk is full")

    compile, compiled = jax.stages.Lowered.compile, []

    def found(lowered, *given, **options):
        compiled.append(lowered)
        jax.monitoring.record_event(executables.FOUND)
        return compile(lowered, *given, **options)

    if fails == "serialize":
        monkeypatch.setattr(executables.serialize_executable, "serialize", refuse)
    elif fails == "full":
        monkeypatch.setattr(executables.files, "replace", refuse)
    else:
        monkeypatch.setattr(verify, "_undecided", {"a trial"})
    made = engine(target, drafter)
    monkeypatch.setattr(jax.stages.Lowered, "compile", found)
    made.batch.compile(made.batch.calls.names)
    assert len(compiled) == 3
    assert not list(directory.glob("*"))


@pytest.mark.slow
def test_processes_one_after_the_other_answer_alike(tmp_path):
    """Also one that finds its programs in jax's cache alone, and the next."""
    kept = tmp_path / "dflash_jax" / "programs"
    command = [sys.executable, "-m", "dflash_jax.serve", "--prompt", PROMPT, "--no-speculation"]
    surroundings = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    surroundings.pop("JAX_ENABLE_COMPILATION_CACHE", None)

    def answer():
        return subprocess.run(command, env=surroundings, check=True, capture_output=True, text=True).stdout

    first = answer()
    assert len(list(kept.iterdir())) == 2  # a prompt's, and a step's
    assert answer() == first
    shutil.rmtree(kept)  # those in jax's own cache stay
    assert answer() == first
    assert len(list(kept.iterdir())) == 2
    assert answer() == first


def test_a_directory_that_cannot_be_written_changes_nothing(target, drafter, directory, monkeypatch):
    directory.parent.mkdir()
    directory.write_text("a file where the directory would be")
    assert path(engine(target, drafter)) is None  # jax's own cache serves
    assert answers(engine(target, drafter))
    assert directory.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["full", "refused"])
def test_nothing_is_kept_without_a_kernel_that_may_run_next_time(target, drafter, directory, monkeypatch, how):
    """The device was full, or a verdict was there that may be removed."""
    if how == "full":
        monkeypatch.setattr(verify, "_undecided", {"a trial"})
    else:
        monkeypatch.setattr(verify, "_known", {"a trial": "results differ"})
    answers(engine(target, drafter))
    assert not directory.exists()


def test_what_cannot_be_named_is_not_kept(target, directory, monkeypatch):
    class Local(BigramDrafter):
        """No module leads to it."""

    assert path(engine(target, Local(64))) is None
    monkeypatch.setattr(executables, "_sources", lambda: None)  # one was written after this process began
    assert path(engine(target, None)) is None


def test_programs_are_kept_where_jax_keeps_its_own(tmp_path):
    names = "jax_compilation_cache_dir", "jax_enable_compilation_cache"
    before = [jax.config.values[name] for name in names]
    found = []
    try:
        for values in ((str(tmp_path), True), (str(tmp_path), False), (None, True)):
            for name, value in zip(names, values, strict=True):
                jax.config.update(name, value)
            found.append(executables.enabled())
    finally:
        for name, value in zip(names, before, strict=True):
            jax.config.update(name, value)
    assert found == [True, False, False]


def test_programs_that_no_start_reads_are_removed(target, drafter, directory):
    answers(engine(target, drafter))
    read, other = path(engine(target, drafter)), directory / "other"
    other.write_bytes(b"")
    (directory / "new").write_bytes(b"")
    for one in (read, other):
        os.utime(one, (0, 0))
    answers(engine(target, drafter))  # reads that one again
    assert read.stat().st_mtime > 0
    answers(engine(target, drafter, max_length=96))  # keeps others
    assert read.exists()
    assert (directory / "new").exists()
    assert not other.exists()
