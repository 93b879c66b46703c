"""Quantization at load, and what a `quantization_config` says of modules."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dflash_jax import generate, load_drafter, load_target, quantize_speed, serve, spec_generate
from dflash_jax.checkpoint import reader
from dflash_jax.mesh import make_mesh, parse_mesh
from dflash_jax.quantised import EightBit, FourBit, Quantised
from dflash_jax.quantize import parse_quantize
from dflash_jax.storage import Format, Storage, storage
from dflash_jax.train.data import Example, Packing
from dflash_jax.train.step import Batch
from tests import tiny
from tests.train.test_step import CONFIG, one_step

PROMPTS = [[1, 2, 3, 4, 5], [9, 8, 7]]


def formats(params):
    """What each parameter is, by its path."""
    is_quantised = lambda x: isinstance(x, Quantised)
    found = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantised)
    return {"/".join(key.key for key in path): type(leaf) for path, leaf in found if is_quantised(leaf)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target whose head is its own, and a drafter."""
    directory = tmp_path_factory.mktemp("pair")
    tiny.write_target(directory / "target", tiny.target_config(tie_word_embeddings=False))
    tiny.write_drafter(directory / "drafter", tiny.drafter_config())
    return directory


def test_three_keys_of_which_none_follows_from_another(pair):
    place = pair / "target"
    layers = {f"layers_{i}/{name}/weight" for i in range(4) for name in NAMES}
    assert not formats(load_target(place).params)
    assert formats(load_target(place, quantize="target=int8").params) == dict.fromkeys(layers, EightBit)
    assert formats(load_target(place, quantize={"head": "int8"}).params) == {"lm_head": EightBit}
    assert not formats(load_target(place, quantize="drafter=int8,target=none").params)
    both = load_target(place, quantize="target=int4,head=fp8").params
    assert formats(both) == dict.fromkeys(layers, FourBit) | {"lm_head": EightBit}
    assert both["lm_head"].values.dtype == jnp.float8_e4m3fn
    found = formats(load_drafter(pair / "drafter", quantize="drafter=int8,head=int8").params)
    assert {"kv_proj", "layers_0/mlp/down_proj/weight"} <= found.keys()
    assert not any("fc" in path or "norm" in path for path in found)


NAMES = "self_attn/qkv_proj", "self_attn/o_proj", "mlp/gate_up_proj", "mlp/down_proj"


FAMILIES = "qwen3_moe", "qwen3_next", "gemma4", "deepseek_v3", "minimax_m2"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", *FAMILIES])
def test_every_family(family, tmp_path):
    """Experts, too; what is stored quantized stays as it is; the answers of a drafted block are those without."""
    raw = tiny.target_config(**tiny.FAMILIES[family], model_type=family)
    tiny.write_target(tmp_path / "target", raw)
    plain, target = load_target(tmp_path / "target"), load_target(tmp_path / "target", quantize="target=int8,head=int8")
    stored = formats(plain.params)
    found = formats(target.params)
    assert stored.items() <= found.items()
    assert any("experts" in path for path in found)
    for path in stored:
        jax.tree.map(np.testing.assert_array_equal, at(plain.params, path), at(target.params, path))
    tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config())
    drafter = load_drafter(tmp_path / "drafter")
    how = {"max_new_tokens": 12, "stop_token_ids": []}
    assert spec_generate(target, drafter, PROMPTS, **how).tokens == generate(target, PROMPTS, **how).tokens


def test_one_weight_at_a_time_is_plain(pair, monkeypatch):
    """While a model loads, there is no more than what is quantized of it, and one weight."""
    before, most = sum(x.nbytes for x in jax.live_arrays()), [0, 0]
    inner = reader._quantised

    def watched(path, weight, how, place):
        most[0] = max(most[0], sum(x.nbytes for x in jax.live_arrays()) - before)
        most[1] = max(most[1], weight.nbytes)
        return inner(path, weight, how, place)

    monkeypatch.setattr(reader, "_quantised", watched)
    target = load_target(pair / "target", quantize="target=int8,head=int8")
    whole = sum(x.nbytes for x in jax.tree.leaves(target.params))
    assert most[1] < most[0] <= whole + most[1]
    assert whole < 0.6 * sum(x.nbytes for x in jax.tree.leaves(load_target(pair / "target").params))


def test_groups_that_a_mesh_cannot_split(tmp_path):
    tiny.write_target(tmp_path, tiny.target_config(hidden_size=64, num_attention_heads=4, head_dim=16))
    devices = jax.devices()[:2]
    mesh = make_mesh(parse_mesh("model=2", devices), devices)
    with pytest.raises(ValueError, match=r"o_proj/weight in int4: an array of \[64, 1\] cannot be split"):
        load_target(tmp_path, quantize="target=int4", mesh=mesh)


def at(params, path):
    for name in path.split("/"):
        params = params[name]
    return params


@pytest.mark.parametrize(
    "axes", [pytest.param(axes, marks=pytest.mark.slow) for axes in ("model=2", "fsdp=2", "data=2,model=2")]
)
def test_on_a_mesh(axes, pair):
    """Each device quantizes what lies on it, to the same numbers."""
    devices = jax.devices()[: 4 if "," in axes else 2]
    mesh = make_mesh(parse_mesh(axes, devices), devices)
    how = {"max_new_tokens": 12, "stop_token_ids": []}
    quantize = "target=int8,drafter=int8,head=int8"
    alone = load_target(pair / "target", quantize=quantize), load_drafter(pair / "drafter", quantize=quantize)
    split = (
        load_target(pair / "target", quantize=quantize, mesh=mesh),
        load_drafter(pair / "drafter", quantize=quantize, mesh=mesh),
    )
    weight = split[0].params["layers_0"]["mlp"]["down_proj"]["weight"]
    np.testing.assert_array_equal(weight.values, alone[0].params["layers_0"]["mlp"]["down_proj"]["weight"].values)
    assert not weight.values.sharding.is_fully_replicated
    prompts = [*PROMPTS, [3], [4]]
    assert spec_generate(*split, prompts, **how).tokens == spec_generate(*alone, prompts, **how).tokens


def test_a_tied_table_is_looked_up_and_multiplied(tmp_path):
    tiny.write_target(tmp_path, tiny.target_config())
    target = load_target(tmp_path, quantize="head=int8")
    table = target.params["embed_tokens"]
    assert isinstance(table, EightBit)
    assert target.dtype == jnp.float32
    tokens = jnp.asarray([[5, 9, 5]])
    np.testing.assert_array_equal(target.table(tokens), table.astype(jnp.dtype("float32"))[tokens])
    np.testing.assert_array_equal(target.table(tokens[:, :1]), target.table(tokens)[:, :1])


def test_a_dtype_makes_plain_weights_of_stored_ones_before(tmp_path):
    tiny.write_target(tmp_path, tiny.target_config(**tiny.FAMILIES["minimax_m2"], model_type="minimax_m2"))
    weight = lambda **how: load_target(tmp_path, **how).params["layers_0"]["self_attn"]["o_proj"]["weight"]
    assert weight().block == (128, 128)
    assert not isinstance(weight(dtype="float32"), Quantised)
    found = weight(dtype="float32", quantize="target=int8")
    assert (found.block, found.values.dtype) == (None, jnp.int8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("target=int7", "and int8, int4, fp8, none; got 'target'='int7'"),
        ("model=int8", "of target, drafter, head"),
        ("int8", "got 'int8'=''"),
        ("target=int8,target=fp8", "names a key twice"),
        ({"body": "int8"}, "got 'body'='int8'"),
    ],
)
def test_what_cannot_be_asked_for(given, message, pair):
    with pytest.raises(ValueError, match=message):
        load_target(pair / "target", quantize=given)


def test_none_is_nothing():
    assert parse_quantize(None) == parse_quantize("target=none") == {}


GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": GROUP}}
UP = "model.layers.3.mlp.up_proj"


@pytest.mark.parametrize(
    ("given", "module", "expected"),
    [
        (None, UP, None),
        ({}, UP, None),
        (COMPRESSED, UP, Format("fp8")),
        (COMPRESSED, "lm_head", Format("fp8")),
        (COMPRESSED, "model.embed_tokens", None),
        (COMPRESSED | {"ignore": ["lm_head"]}, "lm_head", None),
        (COMPRESSED | {"ignore": ["re:.*up_proj$"]}, UP, None),
        (COMPRESSED | {"ignore": ["re:.*mlp"]}, UP, None),  # the beginning of a name counts
        (COMPRESSED | {"ignore": ["re:.*mlp$"]}, UP, Format("fp8")),
        (COMPRESSED | {"ignore": [UP]}, UP, None),
        (COMPRESSED | {"ignore": [UP]}, UP.replace("3", "31"), Format("fp8")),
        (COMPRESSED | {"ignore": [UP]}, UP.removeprefix("model."), None),  # a drafter's name
        (COMPRESSED | {"ignore": ["language_model.model.layers.3.mlp.up_proj"]}, f"model.language_model{UP[5:]}", None),
        (
            COMPRESSED
            | {"config_groups": {"a": GROUP | {"targets": ["re:.*down_proj"]}, "b": GROUP | {"targets": [UP]}}},
            UP,
            Format("fp8"),
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "lm_head", None),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_convert": ["lm_head"]}, UP, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "lm_head", Format("fp8", single=True)),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*.mlp.*"]}, UP, None),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {UP: {"quant_algo": "FP8"}},
            },
            UP,
            Format("fp8", single=True),
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {UP: {"quant_algo": "FP8"}},
            },
            "lm_head",
            None,
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 64, "dynamic": {r"-:.*\.3\.": {}}},
            UP,
            None,
        ),
        (
            {"quant_method": "auto-round", "bits": 4, "group_size": 64, "extra_config": {UP: {"bits": 16}}},
            UP,
            None,
        ),
        ({"quant_method": "awq", "modules_to_not_convert": ["mlp"]}, UP, None),
    ],
)
def test_the_format_of_a_module(given, module, expected):
    assert storage(given).of(module) == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "must be an object"),
        ({"bits": 4}, "an unknown quantization; load the checkpoint that is not quantized .--quantize quantizes it"),
        ({"quant_method": "quip"}, "the quantization 'quip'.*compressed-tensors, modelopt"),
        (COMPRESSED | {"transform_config": {"config_groups": {"a": {}}}}, "transform_config: its weights are rotated"),
        (COMPRESSED | {"config_groups": None}, "must have config_groups"),
        (COMPRESSED | {"ignore": ["re:("]}, "is not a regular expression"),
        (COMPRESSED | {"format": "marlin-24"}, "stores as 'marlin-24' with .* supported are float-quantized"),
        (
            {"quant_method": "fp8", "weight_block_size": [1, 128]},
            r"weight_block_size \[128, 128\] or null, got \[1, 128\]",
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "must say e4m3"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
            "'NVFP4_AWQ' of ModelOpt is not supported; supported are FP8",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "must say bits 4, version gemm"),
        ({"quant_method": "awq", "group_size": 0}, "group_size must be a positive number, got 0"),
        ({"quant_method": "gptq", "bits": 3}, "must say bits 4"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:marlin"}, "packing_format must be"),
    ],
)
def test_what_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        storage(given)


def test_thousands_of_names_are_found_at_once():
    ignored = [f"model.layers.{i}.mlp.gate" for i in range(5000)]
    found = storage(COMPRESSED | {"ignore": ignored})
    assert isinstance(found, Storage)
    assert [found.of(f"model.layers.{i}.mlp.gate") for i in (0, 4999)] == [None, None]
    assert found.of(UP) == Format("fp8")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model.layers.0.mlp.up_proj.weight_scale": np.ones((7, 1), np.float32)},
            r"up_proj.weight_scale must have shape \[48, 1\], got \[7, 1\]",
        ),
        (
            {"model.layers.0.mlp.up_proj.weight": np.zeros((48, 32), np.int16)},
            "up_proj.weight must be one of I8, got I16",
        ),
        (
            {"model.layers.0.mlp.up_proj.weight_scale": None},
            r"missing model.layers.0.mlp.up_proj.weight_scale \[48, 1\]",
        ),
    ],
)
def test_tensors_that_do_not_fit(change, message, tmp_path):
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    given = COMPRESSED | {
        "format": "int-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": weights}},
    }
    raw = tiny.target_config(quantization_config=given, num_hidden_layers=1)
    tiny.write_target(tmp_path, raw)
    assert isinstance(load_target(tmp_path).params["layers_0"]["mlp"]["down_proj"]["weight"], EightBit)
    from safetensors.numpy import load_file, save_file

    tensors = load_file(tmp_path / "model.safetensors") | change
    save_file({name: x for name, x in tensors.items() if x is not None}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path)


@pytest.mark.slow
def test_a_quantised_drafter(tmp_path):
    """As compressed-tensors and ModelOpt leave one; its fusion may be quantized, too."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    given = COMPRESSED | {
        "format": "int-quantized",
        "config_groups": {"a": {"targets": ["Linear"], "weights": weights}},
    }
    tiny.write_drafter(tmp_path, tiny.drafter_config(quantization_config=given))
    drafter = load_drafter(tmp_path)
    found = formats(drafter.params)
    assert {"kv_proj", "fc/weight", "layers_1/self_attn/q_proj/weight"} <= found.keys()
    assert drafter.dtype == jnp.float32
    tiny.write_target(tmp_path / "target", tiny.target_config())
    target = load_target(tmp_path / "target")
    how = {"max_new_tokens": 12, "stop_token_ids": []}
    assert spec_generate(target, drafter, PROMPTS, **how).tokens == generate(target, PROMPTS, **how).tokens
    raw = json.loads((tmp_path / "config.json").read_text())
    quantised = raw.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match="does not match its config.json"):
        load_drafter(tmp_path)
    assert quantised == given


@pytest.mark.slow
def test_a_drafter_learns_from_a_quantised_target(pair):
    """As from the plain one that it stands for: features, logits and the gradient that comes through its head."""
    target = load_target(pair / "target", quantize="target=int8,head=int8")
    is_quantised = lambda x: isinstance(x, Quantised)
    whole = lambda x: x.astype(jnp.dtype("float32")) if is_quantised(x) else x
    plain = target.replace(params=jax.tree.map(whole, target.params, is_leaf=is_quantised))
    rng = np.random.default_rng(0)
    examples = [Example(rng.integers(0, 60, 24).astype(np.int32), np.arange(24) > 3) for _ in range(4)]
    batch = Batch(*map(jnp.asarray, Packing(examples, CONFIG.length, CONFIG.batch_size, 0).batch(0)))
    (first, metrics), _ = one_step(target, batch)
    (second, expected), _ = one_step(plain, batch)
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=1e-5)
    moments = lambda state: jax.tree.leaves(optax.tree.get(state.optimizer, "mu"))
    for a, b in zip(moments(first), moments(second), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1e-3, float(jnp.max(jnp.abs(b)))))


def test_the_command_line(pair, capsys, tmp_path):
    tiny.write_tokenizer(pair / "target")
    models = ["--target", str(pair / "target"), "--drafter", str(pair / "drafter"), "--max-new-tokens", "6"]
    given = ["--quantise", "target=int8,head=int8", "--block-size", "4", "--prompt", "abc"]  # the British form
    assert serve.main([*models, *given]) == 0
    assert "quantized weights: target INT8\n" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        serve.main([*models, "--quantize", "target=int7", "--prompt", "abc"])
    assert "int8, int4, fp8, none" in capsys.readouterr().err


def test_what_is_slower_is_said(monkeypatch, pair):
    target = load_target(pair / "target", quantize="target=int8,head=int4")
    monkeypatch.setattr(quantize_speed, "seconds", lambda weight, dtype: (3.0 if weight.form == "INT4" else 1.0, 2.0))
    note = quantize_speed.slower_than_plain(target, {"target": "int8", "head": "int4"})
    assert "(INT4 1.5 times as long): --quantize target=int8,head=int4 saves memory and costs time" in note
    monkeypatch.setattr(quantize_speed, "seconds", lambda weight, dtype: (1.0, 2.0))
    assert quantize_speed.slower_than_plain(target, {"target": "int8"}) is None


def test_products_are_timed(pair):
    weight = load_target(pair / "target", quantize="target=int8").params["layers_0"]["mlp"]["down_proj"]["weight"]
    assert all(0 < time < 1 for time in quantize_speed.seconds(weight, jnp.dtype("float32")))
