"""What tells one checkpoint from another."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from dflash_jax.checkpoint.fingerprint import PIECE, PIECES, fingerprint
from tests import tiny


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original")
    tiny.write_target(directory, tiny.target_config())
    tiny.write_tokenizer(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [62]}')
    return directory


@pytest.fixture
def copy(original, tmp_path):
    """A copy as a hub cache holds it: links to files of other names."""
    blobs = shutil.copytree(original, tmp_path / "blobs")
    (tmp_path / "copy").mkdir()
    for i, path in enumerate(sorted(blobs.iterdir())):
        (tmp_path / "copy" / path.name).symlink_to(path.rename(blobs / f"blob{i}"))
    return tmp_path / "copy"


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_copy_has_the_same_fingerprint(original, copy):
    (copy / "README.md").write_text("what nobody reads does not count")
    save_file({"x": np.zeros(1)}, copy / "other.safetensors")
    assert fingerprint(copy) == fingerprint(str(original))


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("config.json", -2),
        ("generation_config.json", -2),
        ("tokenizer.json", 100),
        ("tokenizer_config.json", 9),
        ("chat_template.jinja", 0),
        ("model.safetensors", 20),
        ("model.safetensors", 9000),
        ("model.safetensors", -1),
    ],
)
def test_a_changed_byte_changes_the_fingerprint(original, copy, name, at):
    flip(copy / name, at)
    assert fingerprint(copy) != fingerprint(original)


def test_a_lost_file_changes_the_fingerprint(original, copy):
    (copy / "chat_template.jinja").unlink()
    assert fingerprint(copy) != fingerprint(original)


def test_of_a_large_file_a_sample_is_read(tmp_path):
    tiny.write(tmp_path, {}, {"x": np.zeros(3 * PIECES * PIECE, np.uint8)})
    weights, found = tmp_path / "model.safetensors", fingerprint(tmp_path)
    size = weights.stat().st_size
    start = size - 3 * PIECES * PIECE
    for sampled in (8, start, start + PIECE - 1, size - PIECE, size - 1):
        flip(weights, sampled)
        assert fingerprint(tmp_path) != found
        flip(weights, sampled)
    flip(weights, (start + size) // 2)  # between two of an even number of pieces
    assert fingerprint(tmp_path) == found
    with weights.open("ab") as file:
        file.write(bytes(PIECE))
    assert fingerprint(tmp_path) != found


def test_all_files_of_the_index_count(tmp_path):
    for name in ("a", "b"):
        save_file({name: np.zeros(4, np.float32)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "config.json").write_text("{}")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: f"{name}.safetensors" for name in ("a", "b")}}))
    found = fingerprint(tmp_path)
    flip(tmp_path / "b.safetensors", -1)
    assert fingerprint(tmp_path) != found
    index.write_text("{}")
    with pytest.raises(ValueError, match="weight_map"):
        fingerprint(tmp_path)
