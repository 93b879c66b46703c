"""Tiny checkpoints of every quantized format that is served, written by the format's own tool where there is one."""

import json
from typing import ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import BaseCompressor, unpack_fp4_from_uint8  # noqa: E402
from compressed_tensors.entrypoints.convert.converters import AutoAWQConverter, ModelOptNvfp4Converter  # noqa: E402
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # noqa: E402
from compressed_tensors.quantization.lifecycle.forward import dequantize  # noqa: E402
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from tests.oracle import families  # noqa: E402

SHAPE = {
    "vocab_size": families.VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "eos_token_id": 99,
    "bos_token_id": None,
}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def by_group(weight, strategy, group):
    """Minimum and maximum of what shares a scale."""
    if strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if strategy == "block":
        whole = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 128))
        tiles = whole.reshape(len(whole) // 128, 128, -1, 128)
        return tiles.amin((1, 3)), tiles.amax((1, 3))
    parts = weight.reshape(weight.shape[0], -1, weight.shape[1] if strategy == "channel" else group)
    return parts.amin(2), parts.amax(2)


class Compressed:
    """A format of compressed-tensors."""

    def __init__(self, form, **arguments):
        self.form, self.given = form, arguments
        self.scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments), format=form)
        group = {"targets": ["Linear"], "weights": arguments, "input_activations": None}
        self.config = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"]}
        self.config |= {"config_groups": {"group_0": group}}

    def store(self, weight):
        """The tensors of a weight, and what they stand for."""
        args, state = self.scheme.weights, {"weight": weight}
        extra = {}
        if self.form == "nvfp4-pack-quantized":
            extra["global_scale"] = generate_gparam(weight.min(), weight.max())
            state["weight_global_scale"] = extra["global_scale"]
        ends = by_group(weight, self.given["strategy"], args.group_size)
        state["weight_scale"], zero = calculate_qparams(*ends, args, **extra)
        if not args.symmetric:
            state["weight_zero_point"] = zero
        packed = BaseCompressor.get_value_from_registry(self.form).compress(state, self.scheme)
        return packed, self.plain(packed)

    def plain(self, packed):
        """What the tensors of a weight stand for, in float32: the tool itself rounds NVFP4 to bfloat16."""
        if self.form == "nvfp4-pack-quantized":
            outputs, half = packed["weight_packed"].shape
            numbers = unpack_fp4_from_uint8(packed["weight_packed"], outputs, 2 * half, dtype=torch.float32)
            scale, more = packed["weight_scale"].float(), packed["weight_global_scale"]
            return dequantize(numbers, scale, args=self.scheme.weights, global_scale=more, dtype=torch.float32)
        compressor = BaseCompressor.get_value_from_registry(self.form)
        return compressor.decompress(packed, self.scheme)["weight"].float()


class ModelOpt:
    """NVFP4 as ModelOpt stores it: its global scale is one over compressed-tensors'."""

    config: ClassVar = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}

    def store(self, weight):
        packed, _ = FORMATS["nvfp4"].store(weight)
        own = {"weight": packed["weight_packed"], "weight_scale": packed["weight_scale"]}
        own |= {"weight_scale_2": 1 / packed["weight_global_scale"].reshape(()), "input_scale": torch.tensor(1.0)}
        named = {f"model.layers.0.mlp.up_proj.{name}": value.clone() for name, value in own.items()}
        converted = ModelOptNvfp4Converter(targets=["re:.*proj"]).process(named)
        packed = {name.rpartition(".")[2]: value for name, value in converted.items()}
        return own, FORMATS["nvfp4"].plain(packed)


class ModelOptFP8:
    """FP8 with one scale for a weight, and one for its activations, which is not read."""

    config: ClassVar = {
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
        "producer": {"name": "modelopt"},
    }

    def store(self, weight):
        scale = weight.abs().max() / 448
        values = (weight / scale).to(torch.float8_e4m3fn)
        own = {"weight": values, "weight_scale": scale.reshape(()), "input_scale": torch.tensor(1.0)}
        return own, values.float() * scale


class FP8:
    """One scale for a weight, as transformers' FP8 without blocks has it."""

    config: ClassVar = {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"}

    def store(self, weight):
        own, plain = ModelOptFP8().store(weight)
        return {
            "weight": own["weight"],
            "weight_scale_inv": own["weight_scale"],
            "activation_scale": own["input_scale"],
        }, plain


def in_words(numbers):
    """Eight numbers along the last axis in a word, the first in the lowest bits."""
    parts = numbers.reshape(*numbers.shape[:-1], -1, 8).astype(np.int64)
    return torch.tensor((parts << 4 * np.arange(8)).sum(-1).astype(np.uint32).view(np.int32).copy())


class Grouped:
    """Whole numbers with zero points in groups of inputs, [outputs, inputs], by formula."""

    group = 32

    def quantise(self, weight):
        parts = weight.numpy().reshape(weight.shape[0], -1, self.group)
        low, high = np.minimum(parts.min(2), 0), np.maximum(parts.max(2), 0)
        scale = ((high - low) / 15).astype(np.float16)
        zero = np.clip(np.round(-low / scale), 0, 15).astype(np.int64)
        numbers = np.clip(np.round(parts / scale[..., None]) + zero[..., None], 0, 15).astype(np.int64)
        return numbers.reshape(weight.shape), scale, zero

    def plain(self, numbers, scale, zero):
        wide = numbers.reshape(*scale.shape, -1) - zero[..., None]
        return torch.tensor((wide * scale[..., None].astype(np.float32)).reshape(numbers.shape)).float()


class AWQ(Grouped):
    """Words along outputs, which take turns in them."""

    config: ClassVar = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}

    def store(self, weight):
        numbers, scale, zero = self.quantise(weight)
        turned = lambda x: in_words(
            x.T.reshape(x.shape[1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(x.shape[1], -1)
        )
        own = {"qweight": turned(numbers), "qzeros": turned(zero), "scales": torch.tensor(scale.T.copy())}
        named = {f"model.layers.0.mlp.up_proj.{name}": value.clone() for name, value in own.items()}
        converted = AutoAWQConverter(group_size=32, targets=["re:.*proj"]).process(named)
        packed = {name.rpartition(".")[2]: value for name, value in converted.items()}
        packed["weight_scale"] = packed["weight_scale"].float()
        return own, FORMATS["pack asymmetric"].plain(packed)


class GPTQ(Grouped):
    """Words along inputs.

    Args:
        version: what is stored of zero points: they less one, or they.
        ordered: whether groups are of inputs that do not lie side by side.
    """

    def __init__(self, version=1, *, ordered=False, method="gptq"):
        self.version, self.ordered = version, ordered
        self.config = {"quant_method": method, "bits": 4, "group_size": 32, "desc_act": ordered, "sym": False}
        self.config |= {"checkpoint_format": "gptq" if version == 1 else "gptq_v2"} if method == "gptq" else {}
        self.config |= {"packing_format": "auto_round:auto_gptq"} if method != "gptq" else {}

    def store(self, weight):
        inputs = weight.shape[1]
        order = np.random.default_rng(inputs).permutation(inputs) if self.ordered else np.arange(inputs)
        groups = np.empty(inputs, np.int64)
        groups[order] = np.arange(inputs) // self.group
        in_order = np.argsort(groups, kind="stable")
        numbers, scale, zero = self.quantise(weight[:, in_order])
        own = {"scales": torch.tensor(scale.T.copy()), "g_idx": torch.tensor(groups, dtype=torch.int32)}
        own["qzeros"] = in_words((zero.T - (self.version == 1)) & 15)
        stored = np.empty_like(numbers)
        stored[:, in_order] = numbers
        own["qweight"] = in_words(stored).T.contiguous()
        plain = torch.empty_like(weight)
        plain[:, in_order] = self.plain(numbers, scale, zero)
        return own, plain


FLOAT8 = {"num_bits": 8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int"}
FORMATS = {
    "fp8": FP8(),
    "fp8 tensor": Compressed("float-quantized", **FLOAT8, strategy="tensor"),
    "fp8 channel": Compressed("float-quantized", **FLOAT8, strategy="channel"),
    "fp8 block": Compressed("float-quantized", **FLOAT8, strategy="block", block_structure=[128, 128]),
    "int8": Compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "modelopt fp8": ModelOptFP8(),
    "pack": Compressed("pack-quantized", **INT4, strategy="group", group_size=32),
    "pack 128": Compressed("pack-quantized", **INT4, strategy="group", group_size=128),
    "pack channel": Compressed("pack-quantized", **INT4, strategy="channel"),
    "pack asymmetric": Compressed("pack-quantized", **INT4, strategy="group", group_size=32, symmetric=False),
    "nvfp4": Compressed("nvfp4-pack-quantized", **NVFP4),
    "modelopt nvfp4": ModelOpt(),
    "mxfp4": Compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    "awq": AWQ(),
    "gptq": GPTQ(),
    "gptq v2": GPTQ(2),
    "gptq ordered": GPTQ(ordered=True),
    "auto-round": GPTQ(method="auto-round"),
}
EIGHT = ("fp8", "fp8 tensor", "fp8 channel", "fp8 block", "int8", "modelopt fp8")


def make(directory, name, *, head=False, **changes):
    """The checkpoint, and transformers' model with the weights that it stands for; with a quantized head, if asked."""
    config = transformers.Qwen3Config(**SHAPE | changes)
    theirs = families.randomise(transformers.Qwen3ForCausalLM(config), 0).eval()
    tensors, form = {}, FORMATS[name]
    quantised = {f"{path}.weight" for path, m in theirs.named_modules() if isinstance(m, torch.nn.Linear)}
    for path, weight in theirs.state_dict().items():
        if path not in quantised or ("lm_head" in path and not head):
            tensors[path] = weight
            continue
        own, plain = form.store(weight.clone())
        tensors |= {f"{path.removesuffix('weight')}{part}": value.contiguous() for part, value in own.items()}
        with torch.no_grad():
            weight.copy_(plain)
    directory.mkdir(parents=True, exist_ok=True)
    raw = json.loads(config.to_json_string(use_diff=False)) | {"model_type": "qwen3", "dtype": "float32"}
    raw["rope_theta"] = 10000.0
    described = form.config | ({"ignore": [], "lm_head": True} if head else {})
    if "quantization" in form.config:
        (directory / "hf_quant_config.json").write_text(json.dumps(described))
    else:
        raw["quantization_config"] = described
    (directory / "config.json").write_text(json.dumps(raw))
    save_file({path: value.clone() for path, value in tensors.items()}, directory / "model.safetensors")
    return theirs
