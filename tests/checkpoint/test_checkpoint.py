"""Files on disk: every form loads, every defect is named."""

import json
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dflash_jax import checkpoint, load_drafter, load_target
from dflash_jax.drafters import drafter_config
from dflash_jax.drafters.dflash import DFlash
from dflash_jax.models import qwen3, target_config
from tests import tiny

RAW = tiny.target_config(attention_bias=True)


@pytest.fixture
def directory(tmp_path):
    return tiny.write_target(tmp_path, RAW)


def split(directory):
    """Rewrites a checkpoint as two shards with an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, directory / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_sharded_and_single_files_load_alike(directory):
    single = load_target(directory)
    split(directory)
    assert jax.tree.all(jax.tree.map(np.array_equal, single.params, load_target(directory).params))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_stored_and_requested_dtypes(directory, dtype):
    path = directory / "model.safetensors"
    wide = load_file(path)
    save_file({name: x.astype(dtype) for name, x in wide.items()}, path)
    params = load_target(directory, dtype="float32").params
    np.testing.assert_array_equal(
        params["embed_tokens"], wide["model.embed_tokens.weight"].astype(dtype).astype(np.float32)
    )
    assert load_target(directory, dtype="bfloat16").params["embed_tokens"].dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("kind", ["target", "drafter"])
def test_saving_gives_back_every_tensor(kind, tmp_path):
    if kind == "target":
        tiny.write_target(tmp_path / "in", RAW)
        params, table = load_target(tmp_path / "in").params, qwen3.tensors(target_config(RAW))
        raw = RAW
    else:
        raw = tiny.drafter_config(attention_bias=True)
        tiny.write_drafter(tmp_path / "in", raw)
        params, table = load_drafter(tmp_path / "in").params, DFlash().tensors(drafter_config(raw))
    checkpoint.save(tmp_path / "out", params, table, raw)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    assert set(before) == set(after)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    if kind == "drafter":
        assert len(after) == 2 * 11 + 3 + 2 * 4  # method 7.3, and four biases a layer


def test_all_defects_come_in_one_error(directory):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    tensors["model.extra"] = np.zeros(3, np.float32)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:5]
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.int32)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="missing model.norm.weight") as error:
        load_target(directory)
    message = str(error.value)
    for part in ("unexpected model.extra", f"{name} must have shape [48, 32], got [5, 32]", "got I32"):
        assert part in message


def test_defects_that_are_alike_are_counted(directory):
    """A message with a line for each of 18,000 tensors helps nobody."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    gone = [name for name in tensors if name.endswith("mlp.up_proj.weight")]
    save_file({name: value for name, value in tensors.items() if name not in gone}, path)
    with pytest.raises(ValueError, match="more like it") as error:
        load_target(directory)
    assert f"missing {gone[0]} [48, 32] (and {len(gone) - 1} more like it)" in str(error.value)
    assert gone[1] not in str(error.value)


def test_a_tied_target_may_carry_its_head(directory):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, path)
    load_target(directory)


def test_broken_files_are_named(directory, tmp_path):
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    for broken in (whole[: len(whole) // 2], whole[:5], b"", b"x" * 100):
        path.write_bytes(broken)
        with pytest.raises(ValueError, match="model.safetensors is not a complete safetensors file"):
            load_target(directory)
    path.unlink()
    with pytest.raises(ValueError, match="found neither"):
        load_target(directory)
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ValueError, match="gone.safetensors"):
        load_target(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json must be JSON"):
        load_target(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match="found none"):
        load_target(directory)
    with pytest.raises(ValueError, match="directory, a .gguf file or a hub id"):
        load_target(tmp_path / "nowhere" / "at all")
    with pytest.raises(ValueError, match="could not be downloaded from the hub"):
        load_target("nobody/nothing")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite_are_named(directory, dtype, value):
    tensors = {name: x.astype(dtype) for name, x in load_file(directory / "model.safetensors").items()}
    tensors["model.layers.2.mlp.up_proj.weight"][3, 4] = value
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match="'model.layers.2.mlp.up_proj.weight' holds infinite numbers or NaN"):
        load_target(directory)


@pytest.mark.parametrize("name", ["../a.safetensors", "/a.safetensors", "b/../a.safetensors"])
def test_an_index_names_files_of_its_own_directory(directory, name):
    split(directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="must name files of its own directory"):
        load_target(directory)


def test_the_files_themselves_say_what_they_hold(directory):
    """An index that names another of its files for a tensor changes nothing: each tensor stands in one of them."""
    expected = load_target(directory).params
    split(directory)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = index["weight_map"]
    files["model.norm.weight"] = next(name for name in files.values() if name != files["model.norm.weight"])
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert jax.tree.all(jax.tree.map(np.array_equal, load_target(directory).params, expected))


def test_names_of_tensors_are_printed_without_escape_codes(directory):
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"x\x1b[31m": np.zeros(1, np.float32)}, directory / "model.safetensors")
    with pytest.raises(ValueError, match="unexpected 'x") as error:
        load_target(directory)
    assert "\x1b" not in str(error.value)


def test_a_tensor_in_two_files_is_an_error(directory):
    whole = load_file(directory / "model.safetensors")
    split(directory)
    one = load_file(directory / "a.safetensors")
    other = next(name for name in whole if name not in one)
    save_file(one | {other: whole[other]}, directory / "a.safetensors")
    with pytest.raises(ValueError, match="twice, in a.safetensors and b.safetensors"):
        load_target(directory)


def test_published_aliases_of_drafter_names(tmp_path):
    raw = tiny.drafter_config(num_hidden_layers=1)
    tiny.write_drafter(tmp_path, raw)
    plain = load_drafter(tmp_path).params
    path = tmp_path / "model.safetensors"
    aliases = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc.", "layers.0.": "midlayer."}

    def alias(name):
        return next((new + name.removeprefix(old) for old, new in aliases.items() if name.startswith(old)), name)

    save_file({alias(name): x for name, x in load_file(path).items()}, path)
    assert jax.tree.all(jax.tree.map(np.array_equal, plain, load_drafter(tmp_path).params))


def test_extra_mechanisms_are_refused_not_dropped(tmp_path):
    tiny.write_drafter(tmp_path, tiny.drafter_config())
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"layers.0.self_attn.g_proj.weight": np.zeros((4, 32), np.float32)}, path)
    with pytest.raises(ValueError, match="unexpected layers.0.self_attn.g_proj"):
        load_drafter(tmp_path)


def test_nothing_is_held_twice(tmp_path):
    """On CPU a device array may be the very host buffer it came from, so the weights may count once."""
    raw = tiny.target_config(hidden_size=256, intermediate_size=256, num_hidden_layers=12)
    tiny.write_target(tmp_path, raw)
    load_target(tmp_path)  # imports and caches
    tracemalloc.start()
    target = load_target(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sizes = [x.nbytes for x in jax.tree.leaves(target.params)]
    assert sum(sizes) > 10 * max(sizes)
    assert peak < sum(sizes) + 2 * max(sizes) + 300_000


def test_a_table_of_large_tensors_is_small():
    large = {"hidden_size": 2**18, "vocab_size": 2**24, "intermediate_size": 2**20, "tie_word_embeddings": False}
    config = target_config(tiny.target_config(**large))
    tracemalloc.start()
    table = qwen3.tensors(config)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table["embed_tokens"].shape == (2**24, 2**18)
    assert most < 2**20


def test_every_table_covers_every_parameter_once():
    for table in (
        qwen3.tensors(target_config(tiny.target_config(tie_word_embeddings=False))),
        DFlash().tensors(drafter_config(tiny.drafter_config(attention_bias=True))),
    ):
        for leaf in table.values():
            covered = np.zeros(leaf.shape, int)
            for part in leaf.parts:
                covered[part.index] += 1
            assert (covered == 1).all()


def test_what_is_stacked_by_its_sections_is_what_is_stacked():
    def sections(expert, width=6):
        names = [f"experts.{expert}.{name}" for name in ("gate", "up")]
        return [checkpoint.Section(checkpoint.Stored(name, (4, width))) for name in names]

    each = [sections(expert) for expert in range(3)]
    for shards in (1, 2):
        expected = checkpoint.stacked([checkpoint.fused(one, shards) for one in each])
        assert checkpoint.fused_each(each, shards) == expected
    with pytest.raises(ValueError, match="must be alike"):
        checkpoint.fused_each([sections(0), sections(1, width=5)])
    with pytest.raises(ValueError, match="cannot be split over 3 shards"):
        checkpoint.fused_each(each, 3)
