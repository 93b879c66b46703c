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
    """Which compares samples and weights with those of autoregressive decoding, bit for bit."""
    environment = {**os.environ, "SMOKE": "1", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(COLAB.parent)}
    done = subprocess.run(
        [sys.executable, COLAB / "rl_rollouts.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    assert "samples and weights are the same after 20 steps" in done.stdout
    plain = done.stdout.partition("without a drafter")
    taus = [[float(tau) for tau in re.findall(r"tau ([\d.]+),", part)] for part in (plain[0], plain[2])]
    assert len(taus[0]) == 20
    assert min(taus[0]) > 1.5
    assert set(taus[1]) == {1.0}


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


# Paths of each trainer, what they are in a checkpoint, and shapes: V tokens, D width, N and K heads of H, F inside.
TUNIX = """
embedder/input_embedding              model.embed_tokens                V,D
layers/{}/input_layernorm/w           model.layers.{}.input_layernorm   D
layers/{}/attn/q_proj/w               model.layers.{}.self_attn.q_proj  D,N,H
layers/{}/attn/k_proj/w               model.layers.{}.self_attn.k_proj  D,K,H
layers/{}/attn/v_proj/w               model.layers.{}.self_attn.v_proj  D,K,H
layers/{}/attn/o_proj/w               model.layers.{}.self_attn.o_proj  N,H,D
layers/{}/attn/q_norm/w               model.layers.{}.self_attn.q_norm  H
layers/{}/attn/k_norm/w               model.layers.{}.self_attn.k_norm  H
layers/{}/post_attention_layernorm/w  model.layers.{}.post_attention_layernorm  D
layers/{}/mlp/gate_proj/kernel        model.layers.{}.mlp.gate_proj     D,F
layers/{}/mlp/up_proj/kernel          model.layers.{}.mlp.up_proj       D,F
layers/{}/mlp/down_proj/kernel        model.layers.{}.mlp.down_proj     F,D
final_norm/w                          model.norm                        D
lm_head/w                             lm_head                           D,V
"""
MAXTEXT = """
token_embedder/embedding                                  model.embed_tokens                V,D
decoder/layers_{}/pre_self_attention_layer_norm/scale     model.layers.{}.input_layernorm   D
decoder/layers_{}/self_attention/query/kernel             model.layers.{}.self_attn.q_proj  D,N,H
decoder/layers_{}/self_attention/key/kernel               model.layers.{}.self_attn.k_proj  D,K,H
decoder/layers_{}/self_attention/value/kernel             model.layers.{}.self_attn.v_proj  D,K,H
decoder/layers_{}/self_attention/out/kernel               model.layers.{}.self_attn.o_proj  N,H,D
decoder/layers_{}/self_attention/query_norm/scale         model.layers.{}.self_attn.q_norm  H
decoder/layers_{}/self_attention/key_norm/scale           model.layers.{}.self_attn.k_norm  H
decoder/layers_{}/post_self_attention_layer_norm/scale    model.layers.{}.post_attention_layernorm  D
decoder/layers_{}/mlp/wi_0/kernel                         model.layers.{}.mlp.gate_proj     D,F
decoder/layers_{}/mlp/wi_1/kernel                         model.layers.{}.mlp.up_proj       D,F
decoder/layers_{}/mlp/wo/kernel                           model.layers.{}.mlp.down_proj     F,D
decoder/decoder_norm/scale                                model.norm                        D
decoder/logits_dense/kernel                               lm_head                           D,V
"""


def tree_of(table, tensors, raw, *, stacked=False, padded=0):
    """What a trainer would hold of a checkpoint: matrices turned over, tables with more tokens, layers in one array."""
    sizes = {"V": "vocab_size", "D": "hidden_size", "N": "num_attention_heads", "K": "num_key_value_heads"}
    sizes |= {"H": "head_dim", "F": "intermediate_size"}
    found = {}
    for path, name, axes in (line.split() for line in table.split("\n") if line):
        shape = [raw[sizes[axis]] for axis in axes.split(",")]
        layers = range(raw["num_hidden_layers"]) if "{}" in name else [0]
        arrays = [tensors[f"{name.format(i)}.weight"] for i in layers]
        arrays = [x if axes == "V,D" else x.T.reshape(shape) for x in arrays]
        arrays = [np.pad(x, [(0, padded if axis == "V" else 0) for axis in axes.split(",")]) for x in arrays]
        if stacked and len(arrays) > 1:
            found[path.replace("_{}", "")] = np.stack(arrays, axis=1)
        else:
            found |= {path.format(i): x for i, x in enumerate(arrays)}
    return nested(found)


@pytest.mark.parametrize("trainer", ["tunix", "maxtext", "maxtext, stacked"])
def test_parameters_of_other_trainers(trainer, tmp_path):
    raw = tiny.target_config(tie_word_embeddings=False)
    first, second = (tiny.write_target(tmp_path / str(i), raw, seed=i) for i in range(2))
    engine, new = Engine(load_target(first), max_length=64), load_target(second)
    tensors, other = load_file(second / "model.safetensors"), module()
    if trainer == "tunix":
        renamed = other.from_tunix(tree_of(TUNIX, tensors, raw))
    else:
        held = tree_of(MAXTEXT, tensors, raw, stacked="stacked" in trainer, padded=8)
        renamed = other.from_maxtext(held, tiny.VOCAB)
        with pytest.raises(ValueError, match="no parameter of a dense Qwen3: params/"):
            other.from_maxtext({"params": held}, tiny.VOCAB)
    assert renamed.keys() == tensors.keys()
    engine.update_from_tensors(target=renamed)
    asked = [tiny.ask([1, 2, 3], 20)]
    (answer,), (expected,) = engine.generate(asked), Engine(new, max_length=64).generate(asked)
    assert answer.token_ids == expected.token_ids
