"""gpt-oss targets (`model_type: gpt_oss`): experts in MXFP4, attention sinks, windows on every other layer.

Reference: transformers `models/gpt_oss/modeling_gpt_oss.py`; MXFP4 in `integrations/mxfp4.py`.
"""

from dataclasses import replace

from dflash_jax.checkpoint import Leaf, Merged, QuantisedLeaf, Section, Source, Stored, Table, copied, fused, of_product
from dflash_jax.config import ExpertsConfig, LayerConfig, Raw, TargetConfig
from dflash_jax.config_json import (
    DECODER_FIELDS,
    attention_config,
    check_fields,
    layer_types,
    require,
    target_fields,
)
from dflash_jax.mesh import WHOLE, Layout
from dflash_jax.models import decoder, tables
from dflash_jax.models.norms import Float32RMSNorm
from dflash_jax.quantised import GROUP, FourBit

_FIELDS = """
    layer_types sliding_window num_local_experts num_experts_per_tok router_aux_loss_coef initial_context_length
    swiglu_limit swiglu_alpha
""".split()


def config(raw: Raw) -> TargetConfig:
    """Reads `config.json`; windows follow `layer_types`, by default every other layer has one. Experts are stored in
    MXFP4, as published, or as they are multiplied."""
    fixed = {"hidden_act": "silu", "swiglu_alpha": 1.702, "experts_per_token": raw.get("num_experts_per_tok")}
    check_fields(raw, [*DECODER_FIELDS, *_FIELDS], fixed)
    if raw.get("attention_bias") is False:
        raise ValueError("config.json: attention_bias = False is not supported for gpt_oss, expected True")
    depth, inner = require(raw, "num_hidden_layers"), require(raw, "intermediate_size")
    default = ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(depth)]
    types = layer_types(raw, depth, default=default)
    window = require(raw, "sliding_window") if "sliding_attention" in types else None
    count, chosen = require(raw, "num_local_experts"), require(raw, "num_experts_per_tok")
    limit = 7.0 if raw.get("swiglu_limit") is None else require(raw, "swiglu_limit", float)
    experts = ExpertsConfig(count, chosen, inner, scores="softmax_topk", bias=True, swiglu_limit=limit)
    attention = attention_config({**raw, "attention_bias": True}, sinks=True)
    mixers = (replace(attention, window=window if kind == "sliding_attention" else None) for kind in types)
    return TargetConfig(
        **target_fields(raw),
        layers=tuple(LayerConfig(mixer, inner, experts) for mixer in mixers),
        model_type="gpt_oss",
    )


class Layer(decoder.Layer):
    """A layer whose norms are rounded last."""

    norm_class = Float32RMSNorm


class Model(decoder.Decoder):
    layer = Layer


def tensors(config: TargetConfig, layout: Layout = WHOLE) -> Table:
    """Checkpoint tensors of every parameter. Rows of gate and up take turns."""

    def turned(source: Source, axis: int = 1, dtype: str | None = None) -> Leaf:
        rows = source.shape[axis]
        sections = [Section(source, range(half, rows, 2)) for half in (0, 1)]
        return fused(sections, layout.inner, dtype, axis=1, order=(0, 2, 1) if axis == 2 else None)

    def layer_table(path: str, prefix: str, layer: LayerConfig) -> Table:
        c, D = layer.experts, config.hidden_size
        assert c is not None
        E, inner = c.num_experts, c.intermediate_size
        mlp, ours = f"{prefix}.mlp", f"{path}/experts"
        names = f"{mlp}.experts.gate_up_proj", f"{mlp}.experts.down_proj"
        table = tables.decoder_layer(path, prefix, D, layer, layout, formats=config.storage.of) | {
            f"{ours}/router": copied(f"{mlp}.router.weight", E, D),
            f"{ours}/router_bias": copied(f"{mlp}.router.bias", E),
            f"{ours}/gate_up_bias": turned(Stored(f"{names[0]}_bias", (E, 2 * inner))),
            f"{ours}/down_bias": copied(f"{names[1]}_bias", E, D),
        }
        if (form := config.storage.of(f"{mlp}.experts")) and (form.numbers, form.packing) != ("mxfp4", ""):
            raise ValueError(
                f"config.json: experts of gpt-oss are stored in MXFP4 or plain, got {config.storage.method}"
            )
        if form is None:  # [experts, in, out]
            down = Section(Stored(names[1], (E, inner, D)))
            table[f"{ours}/gate_up_proj"] = of_product(turned(Stored(names[0], (E, D, 2 * inner)), axis=2))
            table[f"{ours}/down_proj"] = of_product(fused([down], order=(0, 2, 1)))
            return table
        gate_up = [turned(source, dtype="uint8") for source in _blocks(names[0], (E, 2 * inner, D))]
        down = [fused([Section(source)], dtype="uint8") for source in _blocks(names[1], (E, D, inner))]
        for name, leaves in (("gate_up_proj", gate_up), ("down_proj", down)):
            arrays = {"values": leaves[0], "scale": leaves[1]}
            table[f"{ours}/{name}"] = QuantisedLeaf(arrays, FourBit, {"code": "e2m1"})
        return table

    return tables.decoder(config, layer_table)


def _blocks(name: str, shape: tuple[int, int, int]) -> tuple[Merged, Stored]:
    """The bytes of a weight, two numbers each, and the exponents of its groups of 32."""
    *outer, width = shape
    if width % GROUP:
        raise ValueError(f"{name}: MXFP4 has groups of {GROUP} inputs, and {width} is not a multiple of it")
    values = Merged(f"{name}_blocks", (*outer, width // 2), GROUP // 2, ("U8",))
    return values, Stored(f"{name}_scales", (*outer, width // GROUP), ("U8",))


ignored = tables.ignored
