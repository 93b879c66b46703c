"""GGUF files as checkpoint directories: config and tokenizer are written out once, weights are read from the file.

Reference: the GGUF specification (ggml `docs/gguf.md`), and transformers' `modeling_gguf_pytorch_utils.py`.
"""

import hashlib
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dflash_jax import files
from dflash_jax.checkpoint import gguf_blocks
from dflash_jax.storage.gguf import FORMATS

FORMAT = 2  # of the directories that are written
INDEX = "gguf.json"
WIDENED = 2**16  # bytes of blocks that are taken as one row, at most

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_FREQUENCIES = "rope_freqs.weight"  # by which rotary frequencies are divided: what llama3 scaling comes to
_KNOWN = frozenset(
    """
    block_count context_length embedding_length feed_forward_length vocab_size attention.head_count
    attention.head_count_kv attention.layer_norm_rms_epsilon attention.key_length attention.value_length
    attention.sliding_window rope.dimension_count rope.freq_base rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.finetuned
""".split()
)


def unpack(path: Path) -> Path:
    """A checkpoint directory for a GGUF file of the llama family, made at the first call and kept in the cache.

    It holds `config.json`, `generation_config.json`, the tokenizer with its chat template, and an index of the
    tensors. The weights stay in the file.

    Raises:
        ValueError: no GGUF file, another architecture, or settings that are not supported.
    """
    path, stat = path.resolve(), path.stat()
    identity = f"{FORMAT} {path} {stat.st_size} {stat.st_mtime_ns}"
    directory = files.cache_directory() / "gguf" / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if (directory / INDEX).is_file():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        with files.reading(path):
            _write(path, made)
        try:
            made.rename(directory)
        except OSError:  # unless another process was faster
            if not (directory / INDEX).is_file():
                raise
    return directory


class Weights:
    """The tensors of an unpacked GGUF file under Hugging Face's names. Those that stay packed are several, `PARTS` of a
    weight; all others are dequantized to float32 where they are read."""

    def __init__(self, directory: Path):
        with files.reading(directory / INDEX) as path:
            index = files.read_json(path)
            self.path, size = Path(index["file"]), int(index["size"])
            self._tensors: dict[str, dict[str, Any]] = dict(index["tensors"])
        if not self.path.is_file() or self.path.stat().st_size != size:
            raise ValueError(f"{self.path} is gone or has changed; name the GGUF file again")
        self._data = np.memmap(self.path, np.uint8, mode="r")

    def keys(self) -> list[str]:
        return [
            f"{name}{part}"
            for name, tensor in self._tensors.items()
            for part in _parts(tensor["kind"], len(tensor["shape"])) or [""]
        ]

    def get_slice(self, name: str) -> "Tensor | Part":
        whole = name
        for part in PARTS:
            whole = whole.removesuffix(part)
        tensor = Tensor(self._data, **self._tensors[whole])
        return tensor if whole == name else Part(tensor, name.removeprefix(whole))


PARTS = "_packed", "_scale", "_offset"


def _kind_of(number: int) -> str:
    """The name of a kind of blocks."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(number).name


def _parts(kind: int, axes: int) -> list[str]:
    """What a tensor of so many axes is read as; nothing if it is one that is dequantized."""
    form = FORMATS.get(_kind_of(kind))
    if form is None or axes != 2:
        return []
    return [part for part in PARTS if part != "_offset" or form.zeros]


class Tensor:
    """One stored tensor; it is read by rows, since a row is what is quantized together.

    Args:
        shape: [out, in] or [size].
        heads: if not 0, the rows of so many rotary heads are stored in turns: first half, second half, and so on.
    """

    def __init__(self, data: np.ndarray, kind: int, offset: int, shape: list[int], heads: int):
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        self._kind, self._shape, self._heads = GGMLQuantizationType(kind), tuple(shape), heads
        block, self._size = GGML_QUANT_SIZES[self._kind]
        rows, width = (1, shape[0]) if len(shape) == 1 else shape
        row = width // block * self._size
        self._rows = data[offset : offset + rows * row].reshape(rows, row)

    def get_shape(self) -> tuple[int, ...]:
        return self._shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        if len(self._shape) == 1:
            return self._widened(self._rows).reshape(-1)[self._order()][index]
        rows = self._rows[index[0]] if not self._heads else self._rows[self._order()[index[0]]]
        return self._widened(rows)[:, index[1]]

    @property
    def kind(self) -> str:
        return self._kind.name

    def blocks(self, index: slice) -> np.ndarray:
        """The blocks of some rows."""
        rows = np.ascontiguousarray(self._rows[self._order()[index]])
        return rows.reshape(-1, self._size)

    def _order(self) -> np.ndarray:
        order = np.arange(self._shape[0])
        return order.reshape(self._heads, -1, 2).swapaxes(1, 2).reshape(-1) if self._heads else order

    def _widened(self, rows: np.ndarray) -> np.ndarray:
        """The numbers of these rows of blocks. Several are given as one, for `gguf` takes 16 at a time."""
        from gguf import dequantize

        count, size = rows.shape
        together = next((n for n in (64, 16, 4) if count % n == 0 and n * size <= WIDENED), 1)
        long = np.ascontiguousarray(rows).reshape(count // together, -1)
        return dequantize(long, self._kind).reshape(count, -1).astype(np.float32, copy=False)


class Part:
    """One array of a tensor that stays packed, a name of `PARTS`; it is read by rows, too."""

    def __init__(self, tensor: Tensor, name: str):
        self._tensor, self._name, self._format = tensor, name, FORMATS[tensor.kind]

    def get_shape(self) -> tuple[int, ...]:
        rows, width = self._tensor.get_shape()
        assert self._format.block is not None
        if self._name != "_packed":
            return rows, width // self._format.block[1]
        return rows, width // (2 if self._format.numbers == "int4" else 1)

    def get_dtype(self) -> str:
        if self._name == "_packed":
            return "U8" if self._format.numbers == "int4" else "I8"
        return "F32" if self._name == "_offset" or self._tensor.kind.endswith("_K") else "F16"

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        kind = gguf_blocks.KINDS[self._tensor.kind]
        part = {"_packed": kind.numbers, "_scale": kind.scale}.get(self._name, kind.offset)
        assert part is not None
        return part(self._tensor.blocks(index[0])).reshape(-1, self.get_shape()[1])[:, index[1]]


def _write(path: Path, directory: Path) -> None:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OSError, OverflowError) as error:
        raise ValueError(f"{path} is not a complete GGUF file ({error}); download it again") from error
    if (architecture := fields.get("general.architecture")) != "llama":
        raise ValueError(f"{path}: GGUF files of architecture 'llama' are supported, got {architecture!r}")
    metadata = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    if unknown := sorted(name for name, value in metadata.items() if name not in _KNOWN and value):
        raise ValueError(f"{path} has settings that are not supported: {', '.join(unknown)}")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = _config(metadata, stored)
    except KeyError as error:
        raise ValueError(f"{path} must give {error}, found none; is it a language model?") from error
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None)) or None
    files.write_json(directory / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_tokenizer({name.removeprefix("tokenizer."): value for name, value in fields.items()}, directory)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {
        _hugging_face_name(name): {
            "kind": int(tensor.tensor_type),
            "offset": int(tensor.data_offset),
            "shape": [int(size) for size in reversed(tensor.shape)],
            "heads": next((count for part, count in heads.items() if f".{part}." in name), 0),
        }
        for name, tensor in stored.items()
        if name != _FREQUENCIES
    }
    about = lambda tensor: (tensor["kind"], len(tensor["shape"]))
    kept = {name.removesuffix(".weight"): tensor for name, tensor in tensors.items() if _parts(*about(tensor))}
    if kept:
        modules = {name: _kind_of(tensor["kind"]) for name, tensor in kept.items()}
        config["quantization_config"] = {"quant_method": "gguf", "modules": modules}
    files.write_json(directory / "config.json", config)
    index = {"format": FORMAT, "file": str(path), "size": path.stat().st_size, "tensors": tensors}
    files.write_json(directory / INDEX, index)


def _hugging_face_name(name: str) -> str:
    """The checkpoint name of a GGUF tensor; the name itself if there is none."""
    match name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER:
            return f"model.layers.{layer}.{_LAYER[part]}.{kind}"
        case [part, kind] if part in _WHOLE:
            return f"{_WHOLE[part]}.{kind}"
    return name


def _config(metadata: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` of a llama, from its settings and tensors."""
    heads, width = _positive(metadata, "attention.head_count"), _positive(metadata, "embedding_length")
    dims = [metadata[f"attention.{kind}_length"] for kind in ("key", "value") if f"attention.{kind}_length" in metadata]
    rotated = metadata.get("rope.dimension_count", width // heads)
    if any(dim != rotated for dim in dims):
        raise ValueError(f"GGUF: {rotated} rotated dimensions of heads of {dims} are not supported; they must be equal")
    window = metadata.get("attention.sliding_window")
    config = {
        "model_type": "mistral" if window else "llama",
        "vocab_size": int(stored["token_embd.weight"].shape[-1]),
        "hidden_size": width,
        "intermediate_size": metadata["feed_forward_length"],
        "num_hidden_layers": metadata["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv", heads),
        "head_dim": rotated,
        "hidden_act": "silu",
        "rms_norm_eps": metadata["attention.layer_norm_rms_epsilon"],
        "max_position_embeddings": metadata["context_length"],
        "rope_theta": _positive({"rope.freq_base": 10000.0} | dict(metadata), "rope.freq_base", float),
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_gate.bias" in stored,
        "tie_word_embeddings": "output.weight" not in stored,
    }
    if window:
        config["sliding_window"] = window
    if (scaling := _rope_scaling(metadata, config, stored)) is not None:
        config["rope_scaling"] = scaling
    return config


def _positive(metadata: Mapping[str, Any], name: str, kind: type = int) -> Any:
    """A setting that must be a number above 0; raises KeyError where there is none."""
    if not isinstance(value := metadata[name], kind) or not value > 0:
        raise ValueError(f"GGUF: {name} must be a positive {kind.__name__}, got {value!r:.80}")
    return value


def _rope_scaling(
    metadata: Mapping[str, Any], config: Mapping[str, Any], stored: Mapping[str, Any]
) -> dict[str, Any] | None:
    kind = metadata.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"GGUF: rope scaling {kind!r} is not supported; expected linear or yarn")
    if kind != "none":
        original = metadata.get("rope.scaling.original_context_length")
        scaling = {"rope_type": kind, "factor": metadata["rope.scaling.factor"]}
        return scaling | ({"original_max_position_embeddings": original} if kind == "yarn" else {})
    if _FREQUENCIES not in stored:
        return None
    divisors = np.asarray(stored[_FREQUENCIES].data, np.float32).reshape(-1)
    # Every published llama3 scaling has these bands and this context; the factor is that of the slowest frequencies.
    scaling = {
        "rope_type": "llama3",
        "factor": float(divisors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    dims = np.arange(0, config["head_dim"], 2) / config["head_dim"]
    rotations = 8192 * config["rope_theta"] ** -dims / (2 * np.pi)
    keep = np.clip((rotations - 1.0) / 3.0, 0.0, 1.0)
    expected = 1 / (keep + (1 - keep) / scaling["factor"])
    if expected.shape != divisors.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ValueError(f"GGUF: the factors in {_FREQUENCIES} are not those of llama3 scaling, which is supported")
    return scaling


def _write_tokenizer(fields: Mapping[str, Any], directory: Path) -> None:
    """The tokenizer as transformers converts it, with the special tokens that the metadata names."""
    if "ggml.tokens" not in fields:
        return
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    library = _converters()
    mapping = library.GGUF_TOKENIZER_MAPPING["tokenizer"]
    given = {name: fields[key] for key, name in mapping.items() if key in fields}
    try:
        tokenizer, _ = library.convert_gguf_tokenizer("llama", given)
    except Exception as error:  # what the libraries raise for a vocabulary that makes no sense
        raise ValueError(f"GGUF: the tokenizer cannot be read ({error})") from error
    tokens = fields["ggml.tokens"]
    special = {}
    for kind, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token := fields.get(f"ggml.{name}_token_id")) is None:
            continue
        if not isinstance(token, int) or not 0 <= token < len(tokens):
            raise ValueError(f"GGUF: {name}_token_id must lie in 0..{len(tokens) - 1}, got {token!r:.80}")
        special[f"{kind}_token"] = tokens[token]
    if fields.get("ggml.add_bos_token", fields.get("ggml.model") == "llama") and (bos := special.get("bos_token")):
        first = [(bos, fields["ggml.bos_token_id"])]
        tokenizer.post_processor = TemplateProcessing(single=f"{bos} $A", special_tokens=first)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.chat_template = fields.get("chat_template")
    fast.save_pretrained(directory)


def _converters() -> ModuleType:
    """The module of transformers that makes tokenizers of GGUF metadata: the first one since 5.23."""
    for name in ("transformers.integrations.gguf.gguf_tokenizer_mapping", "transformers.integrations.ggml"):
        try:
            module = import_module(name)
        except ImportError:
            continue
        if hasattr(module, "convert_gguf_tokenizer"):
            return module
    raise ValueError("this version of transformers cannot make a tokenizer from a GGUF file; 5.15 and 5.23 can")
