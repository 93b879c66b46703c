"""The kernel benchmark runs as it is, and its figures add up."""

import json

import pytest

from dflash_jax.benchmarks import kernels as bench
from dflash_jax.benchmarks import presets
from dflash_jax.kernels import shapes
from tests import tiny


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path, monkeypatch, capsys):
    pair = tiny.target_config(), tiny.drafter_config()
    monkeypatch.setitem(presets.PAIRS, "tiny", pair)
    chosen = {name: shapes.SHAPES[name] for name in ("gpt-oss verify, sliding", "qwen3-8b decode", "kimi-k2.5 decode")}
    monkeypatch.setattr(shapes, "SHAPES", chosen)
    sizes = ["--context", "200", "--batch", "2", "--loops", "2", "--dtype", "float32", "--bandwidth", "20"]
    assert bench.main(["--pair", "tiny", *sizes, "--json", str(tmp_path / "f.json")]) == 0
    figures = json.loads((tmp_path / "f.json").read_text())
    sliding, decode, latent = figures["attention"]
    assert sliding["megabytes"] == pytest.approx(128 * 2 * 2 * 8 * 64 * 4 / 1e6)  # of 200 tokens it sees 128
    assert decode["megabytes"] == pytest.approx(200 * 2 * 2 * 8 * 128 * 4 / 1e6)
    assert latent["megabytes"] == pytest.approx(200 * 2 * 576 * 4 / 1e6)  # keys alone, of which values are a part
    assert decode["of bandwidth"] == pytest.approx(decode["megabytes"] / decode["microseconds"] * 1e12 / 20e9)
    (step,) = figures["step"]
    assert step["ratio"] == pytest.approx(step["speculative ms"] / step["autoregressive ms"])
    assert step["speedup at tau 6.49"] == pytest.approx(6.49 / step["ratio"])
    assert min(value for value in step.values() if isinstance(value, float)) > 0
    assert "cpu, memory bandwidth 20 GB/s" in capsys.readouterr().out


def test_unknown_pairs_are_named(capsys):
    assert bench.main(["--pair", "llama"]) == 2
    assert "--pair must be one of qwen3-4b" in capsys.readouterr().err
    assert bench.bandwidth("NVIDIA H200") == 4.8e12
    assert bench.bandwidth("TPU v5 lite") == 0.82e12
    assert bench.bandwidth("cpu") is None
