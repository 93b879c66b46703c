"""The report of a device: its order, its budget of time, what it goes on with, and every item in toy sizes."""

import json
import os
import re
import subprocess
import sys

import pytest

from dflash_jax.benchmarks.hardware import __main__ as hardware
from dflash_jax.benchmarks.hardware import others, profiles, quantised
from dflash_jax.benchmarks.hardware.kernels import EIGHT_BITS
from dflash_jax.benchmarks.hardware.report import Item, SkippedError, markdown, measure
from dflash_jax.chips import chip_of
from dflash_jax.kernels.shapes import PRODUCTS, SHAPES, TRAINING


def items(found, minutes=0.0):
    def rows(name):
        found.append(name)
        yield {"what": name, "ms": 1.23456}
        if name == "bad":
            raise RuntimeError("no\nmemory")

    def skipped():
        raise SkippedError("there is no GPU")
        yield

    made = {name: Item(f"About {name}", minutes, lambda name=name: rows(name)) for name in ("first", "bad", "last")}
    return made | {"other": Item("Other", minutes, skipped)}


def test_items_run_in_turn_and_failures_leave_the_others(tmp_path):
    found, path = [], tmp_path / "report.json"
    report = measure(items(found), {"device": "toy"}, path, 1.0)
    assert found == ["first", "bad", "last"]
    assert json.loads(path.read_text()) == report
    assert report["items"]["bad"]["failed"] == "RuntimeError: no\\nmemory"
    assert report["items"]["bad"]["rows"] == [{"what": "bad", "ms": 1.23456}]
    text = markdown(report)
    assert "## About first\n\n| what | ms |\n| --- | --- |\n| first | 1.235 |" in text
    assert "- bad: failed: RuntimeError" in text
    assert "- other: there is no GPU" in text
    # Again, with the file: what was done is not done again.
    measure(items(found), json.loads(path.read_text()), path, 1.0)
    assert found == ["first", "bad", "last", "bad"]


def test_what_takes_too_long_is_listed(tmp_path):
    found = []
    report = measure(items(found, minutes=2.0) | {"short": Item("Short", 0.1, lambda: iter(()))}, {}, None, 1.0)
    assert found == []
    assert report["items"]["first"]["skipped"] == "it takes about 2 minutes, and 1.0 were left"
    assert report["items"]["short"]["done"]


def test_five_minutes_reach_the_profile():
    from dflash_jax.benchmarks.hardware.bench import Bench

    made = hardware.all_items(Bench("qwen3-8b", small=True))
    names = list(made)
    assert sum(made[name].minutes for name in names[: names.index("profile") + 1]) < 5


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (["--pair", "none"], "--pair must be one of qwen3-4b"),
        (["--only", "steps,stps"], "--only has items of device, steps"),
        (["--resume"], "--resume needs --json"),
        (["--json", "/nowhere/report.json"], "/nowhere"),
    ],
)
def test_wrong_options(given, error, capsys):
    assert hardware.main([*given, "--small"]) == 2
    assert error in capsys.readouterr().err


def test_a_report_of_another_device_is_not_gone_on_with(tmp_path, capsys):
    path = tmp_path / "report.json"
    given = ["--small", "--only", "device", "--minutes", "9", "--json", str(path)]
    assert hardware.main(given) == 0
    assert "GB/s" in capsys.readouterr().out
    report = json.loads(path.read_text())
    assert [row["what"] for row in report["items"]["device"]["rows"]] == ["copy", "product of 256, float32"]
    assert hardware.main([*given, "--resume"]) == 0
    path.write_text(json.dumps(report | {"device": "NVIDIA H100"}))
    capsys.readouterr()
    assert hardware.main([*given, "--resume"]) == 2
    assert "is of another run: device was NVIDIA H100, and is cpu" in capsys.readouterr().err


NAMES = {
    "gemm_fusion_dot_52": "matrix products",
    "input_reduce_fusion_3": "reductions",
    "loop_dynamic_update_slice_fusion": "dynamic-update-slices",
    "memcpy32_post": "copies",
    "input_scatter_fusion_1": "scatters",
    "mosaic_gpu_kernel": "attention and other kernels of this package",
}

PROFILED = """
import json
import jax
from dflash_jax.benchmarks.hardware import profiles
program = jax.jit(lambda x: jax.numpy.sin(x @ x).sum(axis=0))
x = jax.numpy.ones((64, 64))
jax.block_until_ready(program(x))
print(json.dumps(profiles.by_kind(lambda: jax.block_until_ready(program(x)), 2)))
"""


def run(*command, **environment):
    """In a process of its own: the profiler ends one that has asked a TPU's compiler for something."""
    given = os.environ | {"JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run([sys.executable, *command], env=given, capture_output=True, text=True, check=True).stdout


def test_a_profile_counts_operations():
    found = json.loads(run("-c", PROFILED))
    assert found
    assert all(number > 0 and micro > 0 for number, micro in found.values())


@pytest.mark.parametrize("name", NAMES)
def test_kernels_have_kinds(name):
    assert next(kind for pattern, kind in profiles.KINDS if re.search(pattern, name)) == NAMES[name]


def test_devices_by_what_they_call_themselves():
    assert chip_of("NVIDIA H200").bandwidth == 4.8e12
    assert chip_of("TPU v5 lite").bandwidth == 0.82e12
    assert chip_of("NVIDIA H100 80GB HBM3").flops == 989e12
    assert chip_of("TPU v5").bandwidth == 2.77e12
    assert chip_of("NVIDIA L40S") is None
    assert chip_of("cpu") is None


@pytest.mark.slow
def test_every_item_in_toy_sizes(tmp_path):
    path = tmp_path / "report.json"
    skipped = {"start", "torch"}  # of which the first compiles the bundled pair, and the second is another library
    names = [name for name in hardware.all_items(hardware_bench()) if name not in skipped]
    given = ["--small", "--minutes", "60", "--json", str(path), "--only", ",".join(names)]
    run("-m", "dflash_jax.benchmarks.hardware", *given, XDG_CACHE_HOME=str(tmp_path))
    report = json.loads(path.read_text())
    assert list(report["items"]) == names
    assert [name for name, item in report["items"].items() if not item.get("done")] == ["graphs"]
    coded = [f"{name}, cache in 8 bits" for name in EIGHT_BITS]
    assert [row["shape"] for row in report["items"]["attention"]["rows"]] == [*SHAPES, *coded]
    assert [row["products"] for row in report["items"]["products"]["rows"]] == list(PRODUCTS)
    assert [row["blocks"] for row in report["items"]["anchored"]["rows"]] == list(TRAINING)
    for name in ("attention", "anchored", "products"):
        assert all(row["xla same bits"] and row["xla error"] < 1e-5 for row in report["items"][name]["rows"])
    found = report["items"]["weights"]["rows"]
    experts = 3 * len(quantised.EXPERTS) * len(quantised.EXPERT_KINDS)
    assert len(found) == len(quantised.SHAPES) * len(quantised.KINDS) + experts
    assert all(row["xla error"] < 1e-5 for row in found)
    whole = {f"{name}, INT8" for name in quantised.SHAPES}  # of a CPU's forms, the only one that has them
    assert all(row["xla same bits"] for row in found if row["weights"] in whole)
    (row,) = report["items"]["training"]["rows"]
    assert row["finite"]


@pytest.mark.slow
def test_torch_and_the_official_implementation():
    pytest.importorskip("torch")
    pytest.importorskip("dflash")
    plain, block, official = others.torch_steps(hardware_bench())
    names = ["transformers, plain step", "transformers, pass over a block of 16", "dflash 0.1.0, speculative step"]
    assert [row["torch"] for row in (plain, block, official)] == names
    assert plain["ms"] < block["ms"]
    assert official["ms"] > 0


def hardware_bench():
    from dflash_jax.benchmarks.hardware.bench import Bench

    return Bench("qwen3-8b", small=True)
