"""Quantized checkpoints of every format that is served, against transformers with the weights that they stand for."""

import json
from fnmatch import fnmatchcase as fnmatch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from safetensors.torch import load_file, save_file  # noqa: E402

from dflash_jax import checkpoint, generate, load_drafter, load_target, spec_generate  # noqa: E402
from dflash_jax.checkpoint import Columns  # noqa: E402
from dflash_jax.models import tables  # noqa: E402
from dflash_jax.models.tables import unread_scales  # noqa: E402
from dflash_jax.quantised import EightBit, FourBit, Quantised  # noqa: E402
from tests import tiny  # noqa: E402
from tests.oracle import families  # noqa: E402
from tests.oracle.formats import EIGHT, FORMATS, make  # noqa: E402


@pytest.fixture(autouse=True)
def few_programs():
    """No two checkpoints share programs, of which a process may hold so many (see `conftest.forget_programs`)."""
    yield
    jax.clear_caches()


@pytest.mark.parametrize("name", FORMATS)
def test_forward(name, tmp_path):
    """What is stored is what is multiplied; numbers are those that were written, bit by bit."""
    theirs = make(tmp_path, name)
    ours = load_target(tmp_path)
    layer = ours.params["layers_1"]
    weights = {
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj": layer["self_attn"]["qkv_proj"]["weight"],
        "mlp.gate_proj mlp.up_proj": layer["mlp"]["gate_up_proj"]["weight"],
        "mlp.down_proj": layer["mlp"]["down_proj"]["weight"],
    }
    state = theirs.state_dict()
    for names, weight in weights.items():
        assert isinstance(weight, EightBit if name in EIGHT else FourBit)
        expected = torch.cat([state[f"model.layers.1.{part}.weight"] for part in names.split()])
        np.testing.assert_allclose(weight.astype(jnp.dtype("float32")), expected, rtol=2e-7, atol=0)
        assert 8 * weight.values.nbytes == (8 if name in EIGHT else 4) * np.prod(weight.shape)
    families.assert_same_forward(theirs, ours, tolerance=2e-5)
    plain = load_target(tmp_path, dtype="float32")
    is_quantised = lambda x: isinstance(x, Quantised)
    assert not any(map(is_quantised, jax.tree.leaves(plain.params, is_leaf=is_quantised)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "gptq ordered"])
def test_a_checkpoint_is_saved_as_it_was(name, tmp_path):
    make(tmp_path, name, num_hidden_layers=1)
    ours = load_target(tmp_path)
    unread = [*unread_scales(ours.config)]
    checkpoint.save(tmp_path / "saved", ours.params, tables.uniform(ours.config), {})
    first, second = checkpoint.Reader(tmp_path), checkpoint.Reader(tmp_path / "saved")
    assert second.names() == {n for n in first.names() if not any(fnmatch(n, pattern) for pattern in unread)}
    for tensor in second.names():
        if tensor.endswith("global_scale"):  # which was inverted twice
            np.testing.assert_allclose(first.read(tensor, None), second.read(tensor, None), rtol=2e-7)
        else:
            np.testing.assert_array_equal(first.read(tensor, None).ravel(), second.read(tensor, None).ravel())


# What a wrong reading of a format would give.
MUTATIONS = {
    "an inverted global scale": ("nvfp4", lambda w: w.replace(gain=1 / w.gain)),
    "zero points without their one": ("gptq", lambda w: w.replace(zero=w.zero - 1)),
    "numbers of a byte swapped": ("pack", lambda w: w.replace(values=w.values >> 4 | w.values << 4)),
    "outputs in the order of words": (
        "awq",
        lambda w: w.replace(
            values=w.values.reshape(-1, 8, w.values.shape[1])[:, Columns.order].reshape(w.values.shape)
        ),
    ),
    "inputs in the order of the file": ("gptq ordered", lambda w: w.replace(order=None)),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_wrong_reading_is_seen(mutation, tmp_path):
    name, change = MUTATIONS[mutation]
    theirs = make(tmp_path, name, num_hidden_layers=2)
    ours = load_target(tmp_path)
    families.assert_same_forward(theirs, ours, tolerance=2e-5)
    mlp = ours.params["layers_0"]["mlp"]["gate_up_proj"]
    mlp["weight"] = change(mlp["weight"])
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        families.assert_same_forward(theirs, ours, tolerance=2e-5)


LOSSLESS = ("gptq ordered",)
SOMETIMES = "int8", "fp8 block", "nvfp4", "awq"
HOW = [{"block_size": size} for size in (1, 2, 5, 16)] + [{"block_size": 8, "tree": 31}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *LOSSLESS,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SOMETIMES),
        *(pytest.param(name, marks=pytest.mark.exhaustive) for name in FORMATS if name not in (*LOSSLESS, *SOMETIMES)),
    ],
)
def test_speculation_is_lossless(name, tmp_path):
    """Greedy and sampled, chains and a tree; a drafter that was quantized as it was loaded."""
    make(tmp_path / "target", name)
    target = load_target(tmp_path / "target")
    raw = tiny.drafter_config(vocab_size=families.VOCAB, hidden_size=128, num_target_layers=3, block_size=16)
    raw["dflash_config"] |= {"mask_token_id": families.MASK, "target_layer_ids": [0, 1]}
    tiny.write_drafter(tmp_path / "drafter", raw)
    drafter = load_drafter(tmp_path / "drafter", quantize="drafter=int8")
    assert isinstance(drafter.params["kv_proj"], EightBit)
    for settings in ({}, {"temperature": 1.0, "top_p": 0.9}):
        settings |= {"max_new_tokens": 20, "stop_token_ids": []}
        plain = generate(target, families.prompts(), **settings)
        for how in HOW:
            assert spec_generate(target, drafter, families.prompts(), **how, **settings).tokens == plain.tokens


@pytest.mark.parametrize("name", ["fp8 channel", "pack asymmetric", "modelopt nvfp4", "gptq"])
def test_a_quantised_head(name, tmp_path):
    """Also a drafter without a head of its own multiplies with it."""
    theirs = make(tmp_path, name, head=True, vocab_size=104)
    ours = load_target(tmp_path)
    assert isinstance(ours.params["lm_head"], EightBit if name in EIGHT else FourBit)
    families.assert_same_forward(theirs, ours, tolerance=2e-5)


def test_biases_of_zeros_that_no_layer_has(tmp_path):
    """GPTQ's files have them; others are not passed over."""
    theirs = make(tmp_path, "gptq", num_hidden_layers=2)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.bias"] = torch.zeros(128)
    save_file(tensors, tmp_path / "model.safetensors")
    families.assert_same_forward(theirs, load_target(tmp_path), tolerance=2e-5)
    tensors["model.layers.0.mlp.down_proj.bias"][3] = 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="unexpected model.layers.0.mlp.down_proj.bias"):
        load_target(tmp_path)


def test_orders_of_inputs_that_differ(tmp_path):
    """What is multiplied together must have its inputs in one order."""
    make(tmp_path, "gptq ordered", num_hidden_layers=1)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"k_proj.g_idx must be that of model.layers.0.self_attn.q_proj"):
        load_target(tmp_path)
    tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="k_proj.g_idx must name each of the groups 32 times"):
        load_target(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"]["desc_act"] = False
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="g_idx must be in order, as desc_act = false says"):
        load_target(tmp_path)
