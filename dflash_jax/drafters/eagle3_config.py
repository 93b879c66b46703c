"""What the `config.json` of an EAGLE-3 drafter says, in every published layout."""

from dataclasses import dataclass
from typing import Any

from dflash_jax.config import LayerConfig, Raw
from dflash_jax.config_json import (
    DECODER_FIELDS,
    WINDOW_FIELDS,
    attention_config,
    check_fields,
    layer_types,
    qwen3_layer_types,
    require,
)
from dflash_jax.drafters import known
from dflash_jax.drafters.config import DrafterConfig, drafter_fields
from dflash_jax.drafters.fields import Lookup, flag, size, whole_rotary
from dflash_jax.models.llama import completed

# SGLang 0.5.23 (models/llama_eagle3.py) knows the norms of tapped features by these names, too.
ALIASES = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
_FIELDS = """
    block_size proposal_sharpness target_layer_ids num_target_layers target_hidden_size draft_vocab_size eagle_config
    aux_hidden_state_layer_ids eagle_aux_hidden_state_layer_ids aux_hidden_states_layer_ids use_aux_hidden_state
    num_aux_hidden_states norm_before_residual norm_before_fc fc_norm use_aux_norm norm_output embed_requires_grad
    next_layer_regular parallel_draft_step parallel_draft_heads_num_layers use_input_layernorm_in_first_layer
    use_last_layernorm use_mtp_layernorm
    ttt_length step_loss_decay draft_num_hidden_layers target_model_name_or_path speculators_version speculators_config
""".split()
# What ModelOpt writes of EAGLE-3 as it is; other values are other drafters.
_MODELOPT = {
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


@dataclass(frozen=True)
class Eagle3Config(DrafterConfig):
    """An EAGLE-3 drafter.

    Attributes:
        block_size: verified positions of a step: the anchor's, and one for each pass.
        qk_norm: whether heads of queries and keys have a norm, as Qwen3's do.
        norm_before_residual: whether the residual stream begins after the norm of what is known.
        norm_before_fc: whether the features side by side have a norm before they are fused.
        fc_norm: whether each tapped layer's features have one (EAGLE-3.1).
        norm_output: whether a pass hands on what the final norm made, instead of what it was given (EAGLE-3.1).
    """

    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def read(raw: Raw) -> Eagle3Config:
    """Reads `config.json` of the official layout, of DeepSpec or, flattened, of `speculators`.

    Raises:
        ValueError: more than one layer, contradictions, or fields that nobody knows.
    """
    raw = completed(raw)
    get = Lookup(raw, "eagle_config")
    if unknown := set(get.nested) - set(_FIELDS):
        raise ValueError(f"eagle_config has unknown fields {sorted(unknown)}; they are not ignored")
    if others := {name: get(name) for name, value in _MODELOPT.items() if get(name) not in (None, value)}:
        raise ValueError(f"an EAGLE-3 drafter with {others} is not supported")
    known.refuse_others(get.given, ())
    known.check_inert(get.given)
    fixed = {"hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1, "num_hidden_layers": 1, "bias": False}
    read = [*DECODER_FIELDS, *WINDOW_FIELDS, *_FIELDS, *known.INERT, "partial_rotary_factor"]
    check_fields(raw, read, fixed | {"use_aux_hidden_state": True, "draft_num_hidden_layers": 1})
    if (model := raw.get("model_type")) not in ("llama", "qwen3"):
        raise ValueError(f"the layer of an EAGLE-3 drafter must be that of llama or qwen3, got {model!r}")
    flags: dict[str, Any] = {name: bool(flag(get, name)) for name in ("norm_before_residual", "norm_before_fc")}
    flags |= {"fc_norm": bool(flag(get, "fc_norm", "use_aux_norm")), "norm_output": bool(flag(get, "norm_output"))}
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise ValueError("config.json: norm_before_fc and fc_norm cannot be combined")
    types = (qwen3_layer_types if model == "qwen3" else layer_types)(raw, 1)
    window = require(raw, "sliding_window") if types == ["sliding_attention"] else None
    norm = require(raw, "rms_norm_eps", float) if model == "qwen3" else None
    attention = attention_config(whole_rotary(raw), window=window, qk_norm=norm)
    layer = LayerConfig(attention, require(raw, "intermediate_size"))
    passes = size(get, "ttt_length", default=7, most=2**10)
    fields = drafter_fields(raw, get, block_size=passes + 1, taps=official_taps)
    taps, count = list(fields["target_layer_ids"]), get("num_aux_hidden_states")
    if count is not None and count != len(taps):
        raise ValueError(f"config.json: num_aux_hidden_states is {count!r:.40}, but layers {taps} are tapped")
    return Eagle3Config(**fields, layers=(layer,), qk_norm=model == "qwen3", **flags)


def official_taps(num_target_layers: int | None) -> tuple[int, int, int]:
    """The layers that are tapped where a config names none: those below the 3rd, the middle one and the last three.
    Unlike DFlash's, this rule defines the format: the trainers of SafeAILab, SpecForge and AngelSlim follow it, and
    vLLM and SGLang; other layers are written down.

    Raises:
        ValueError: the depth of the target is not known.
    """
    if num_target_layers is None:
        raise ValueError("config.json must give target_layer_ids or num_target_layers, found neither")
    return 1, num_target_layers // 2 - 1, num_target_layers - 4
