"""The example of reinforcement learning, and parameters under the names of other trainers."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dflash_jax import Engine, load_target
from tests import tiny

COLAB = Path(__file__).parents[1] / "colab"


@pytest.mark.slow
def test_the_example_runs(tmp_path):
    """Which compares samples and weights with those of plain decoding, bit for bit."""
    environment = {**os.environ, "SMOKE": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(COLAB.parent)}
    done = subprocess.run(
        [sys.executable, COLAB / "rl_rollouts.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    assert "samples and weights are the same after 2 steps" in done.stdout
    plain = done.stdout.partition("without a drafter")
    taus = [[float(tau) for tau in re.findall(r"tau ([\d.]+),", part)] for part in (plain[0], plain[2])]
    assert min(taus[0]) > 1.5 > max(taus[1][:2])


def module():
    spec = importlib.util.spec_from_file_location("other_trainers", COLAB / "other_trainers.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def nested(of):
    """A nested dict of arrays by path."""
    tree = {}
    for path, x in of.items():
        *folders, name = path.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = x
    return tree


def tunix(tensors, config):
    """What tunix would hold: projections [inputs, heads, dim], or [heads, dim, outputs]."""
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    found = {
        "embedder/input_embedding": tensors["model.embed_tokens.weight"],
        "final_norm/w": tensors["model.norm.weight"],
    }
    for name, x in tensors.items():
        if not (layer := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)):
            continue
        i, kind = layer.groups()
        path = f"layers/{i}/{kind.replace('self_attn', 'attn').replace('.', '/')}"
        if projection := re.fullmatch(r"self_attn\.([qkv])_proj", kind):
            found[f"{path}/w"] = x.T.reshape(x.shape[1], heads[projection[1]], -1)
        elif kind == "self_attn.o_proj":
            found[f"{path}/w"] = x.T.reshape(heads["q"], -1, x.shape[0])
        else:
            found[f"{path}/kernel" if kind.startswith("mlp") else f"{path}/w"] = x.T
    return nested(found)


def maxtext(tensors, config, names, scan):
    """What MaxText would hold, the table padded, with layers stacked behind the first axis if `scan`."""
    heads = {
        "query": config["num_attention_heads"],
        "key": config["num_key_value_heads"],
        "value": config["num_key_value_heads"],
    }
    found = {"token_embedder/embedding": np.pad(tensors["model.embed_tokens.weight"], ((0, 8), (0, 0)))}
    found["decoder/decoder_norm/scale"] = tensors["model.norm.weight"]
    for path, kind in names.items():
        layers = []
        for i in range(config["num_hidden_layers"]):
            x = tensors[f"model.layers.{i}.{kind}.weight"].T
            kernel = path.split("/")[-2]
            x = x.reshape(x.shape[0], heads[kernel], -1) if kernel in heads else x
            layers.append(x.reshape(heads["query"], -1, x.shape[-1]) if kernel == "out" else x)
        if scan:
            found[f"decoder/layers/{path}"] = np.stack(layers, axis=1)
        else:
            found |= {f"decoder/layers_{i}/{path}": x for i, x in enumerate(layers)}
    return nested(found)


@pytest.mark.parametrize("trainer", ["tunix", "maxtext", "maxtext, stacked"])
def test_parameters_of_other_trainers(trainer, tmp_path):
    raw = tiny.target_config()
    first, second = (tiny.write_target(tmp_path / str(i), raw, seed=i) for i in range(2))
    engine, new = Engine(load_target(first), max_length=64), load_target(second)
    tensors, other = load_file(second / "model.safetensors"), module()
    if trainer == "tunix":
        renamed = other.from_tunix(tunix(tensors, raw))
    else:
        renamed = other.from_maxtext(maxtext(tensors, raw, other.MAXTEXT, "stacked" in trainer), tiny.VOCAB)
    assert renamed.keys() == tensors.keys()
    engine.update_from_tensors(target=renamed)
    asked = [tiny.ask([1, 2, 3], 20)]
    (answer,), (expected,) = engine.generate(asked), Engine(new, max_length=64).generate(asked)
    assert answer.token_ids == expected.token_ids
