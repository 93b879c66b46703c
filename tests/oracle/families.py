"""What every target family must equal: transformers, itself in chunks, on a mesh, saved again, and with a drafter."""

import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
import transformers

from dflash_jax import checkpoint, generate, load_drafter, load_target, models, spec_generate
from dflash_jax.cache import commit
from dflash_jax.mesh import make_mesh, parse_mesh
from dflash_jax.quantised import Quantised
from tests import tiny

VOCAB, MASK = 100, 97


def stored_in_fp8(tensors, name, weight, rng):
    """Adds a weight, [out, in], to a checkpoint's tensors in FP8 with block scales; returns what it stands for."""
    rows, columns = weight.shape
    scale = (0.5 + rng.random((-(-rows // 128), -(-columns // 128)))).astype(np.float32) * 1e-3
    each = np.kron(scale, np.ones((128, 128), np.float32))[:rows, :columns]
    values = np.clip(weight.numpy() / each, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"] = values, scale
    return torch.tensor(values.astype(np.float32) * each)


def randomise(module, seed):
    """Weights large enough that layers, heads, norms and buffers matter."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
            elif weight.ndim >= 2 and "embed" not in name:
                weight.copy_(torch.randn_like(weight) * 1.3 / weight.shape[-1] ** 0.5)
            else:
                weight.copy_(torch.randn_like(weight) * 0.5)
    return module


def prompts(count=3):
    rng = np.random.default_rng(5)
    return [rng.integers(0, MASK, size).tolist() for size in (7, 23, 12)[:count]]


def assert_same_forward(theirs, ours, *, ids=None, tolerance=1e-4):
    """Logits and tapped features of a prompt that is read in two chunks: the second reads the cache of the first. The
    chunks are as long, for one program; of an odd prompt, the second ends with a token that counts for nothing."""
    ids, taps = np.asarray([prompts()[1] if ids is None else ids]), tuple(range(ours.config.num_hidden_layers - 1))
    with torch.inference_mode():
        expected = theirs(torch.tensor(ids), output_hidden_states=True)

    @jax.jit
    def forward(tokens, cache, lengths):
        positions = lengths[:, None] + jnp.arange(tokens.shape[1])[None]
        hidden, features, fresh = ours.forward(tokens, positions, None, cache, lengths, taps=taps)
        return ours.unembed(hidden), features, commit(cache, fresh, lengths, jnp.full(1, tokens.shape[1], jnp.int32))

    count = ids.shape[1]
    half = -(-count // 2)
    tokens = jnp.asarray(np.pad(ids, ((0, 0), (0, 2 * half - count))))
    logits, features, cache = forward(tokens[:, :half], ours.init_cache(1, 32), jnp.asarray([0]))
    more_logits, more_features, _ = forward(tokens[:, half:], cache, jnp.asarray([half]))
    logits = np.concatenate([logits, more_logits], axis=1)[:, :count]
    features = np.concatenate([features, more_features], axis=1)[:, :count]
    np.testing.assert_allclose(logits, expected.logits.numpy(), atol=tolerance)
    hidden = np.concatenate([expected.hidden_states[i + 1].numpy() for i in taps], axis=-1)
    np.testing.assert_allclose(features, hidden, atol=tolerance)
    shifted = np.concatenate([expected.hidden_states[i].numpy() for i in taps], axis=-1)
    assert np.abs(features - shifted).max() > 1e-2  # the control: off by one layer is not the same


def assert_same_generations(theirs, ours, *, budget=30):
    """Greedy tokens of transformers' own loop."""
    answers = generate(ours, prompts(), max_new_tokens=budget, stop_token_ids=[])
    endless = transformers.GenerationConfig(max_new_tokens=budget, do_sample=False, eos_token_id=VOCAB, pad_token_id=0)
    for prompt, answer in zip(prompts(), answers.tokens, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), generation_config=endless)
        assert answer == out[0, len(prompt) :].tolist()


def assert_saved_again(directory, ours, scratch):
    """A checkpoint that is loaded and saved has the same tensors."""
    raw = json.loads((directory / "config.json").read_text())
    table = models.family(ours.config.model_type).tensors(ours.config)
    checkpoint.save(scratch, ours.params, table, raw)
    first, second = checkpoint.Reader(directory), checkpoint.Reader(scratch)
    assert first.names() == second.names()
    for name in first.names():
        everything = (slice(None),) * len(first.shape(name))
        np.testing.assert_array_equal(first.read(name, everything), second.read(name, everything))


def assert_dequantised(directory, packed, *, divisible=True):
    """With a dtype of its own the model has plain weights, those that the packed ones stand for; on a mesh, too, if its
    blocks can be split."""
    is_packed = lambda x: isinstance(x, Quantised)
    expected = jax.tree.map(lambda x: x.astype(jnp.dtype("float32")), packed.params, is_leaf=is_packed)
    mesh = make_mesh(parse_mesh("model=1,expert=2", range(2)), jax.devices()[:2])
    for where in (None, mesh) if divisible else (None,):
        plain = load_target(directory, dtype="float32", mesh=where)
        assert not any(map(is_packed, jax.tree.leaves(plain.params, is_leaf=is_packed)))
        assert_same_parameters = lambda a, b: np.testing.assert_array_equal(np.sort(a, None), np.sort(b, None))
        jax.tree.map(assert_same_parameters, expected, plain.params)  # rows are in another order on a mesh


def assert_lossless(directory, scratch, *, meshes=("data=2,model=2",)):
    """Speculation gives the tokens of autoregressive decoding, greedy and sampled, and so does every mesh."""
    target = load_target(directory)
    width = {
        "vocab_size": VOCAB,
        "hidden_size": target.config.hidden_size,
        "num_target_layers": len(target.config.layers),
    }
    tiny.write_drafter(scratch, tiny.drafter_config(**width, dflash_config={"mask_token_id": MASK}))
    drafter = load_drafter(scratch)
    for settings in ({}, {"temperature": 1.0, "top_p": 0.9, "top_k": 30}):
        settings |= {"max_new_tokens": 24, "stop_token_ids": []}
        plain = generate(target, prompts(), **settings)
        assert spec_generate(target, drafter, prompts(), **settings).tokens == plain.tokens
        for axes in meshes:
            devices = jax.devices()[: math.prod(int(part.split("=")[1]) for part in axes.split(","))]
            mesh = make_mesh(parse_mesh(axes, devices), devices)
            split = load_target(directory, mesh=mesh), load_drafter(scratch, mesh=mesh)
            four = [*prompts(), [3]]  # rows that a mesh can split
            assert spec_generate(*split, four, **settings).tokens[:3] == plain.tokens
