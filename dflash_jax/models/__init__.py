"""Target families: one file per Hugging Face `model_type`, holding only what differs.

A family is a module with `config(raw) -> TargetConfig`; a Linen class `Model(config, layout)` with the methods `table`,
`embed`, `forward`, `head` and `unembed`; `tensors(config, layout)`, which says what every parameter is made of; and
`ignored(config)`, patterns of names of tensors that a checkpoint may carry without use. Where it has parameters of its
own kind, `RULES` says how these are split (see `sharding`).
"""

from types import ModuleType

from dflash_jax.config import Raw, TargetConfig
from dflash_jax.models import deepseek_v3, gemma4, gpt_oss, llama, minimax_m2, qwen2, qwen3, qwen3_moe, qwen3_next
from dflash_jax.sharding import add_rules
from dflash_jax.unsupported import MODEL_TYPES

FAMILIES: dict[str, ModuleType] = {
    "deepseek_v3": deepseek_v3,
    "gemma4": gemma4,
    "gemma4_text": gemma4,
    "gpt_oss": gpt_oss,
    "kimi_k2": deepseek_v3,
    "kimi_k25": deepseek_v3,
    "llama": llama,
    "minimax_m2": minimax_m2,
    "mistral": llama,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_5": qwen3_next,
    "qwen3_5_moe": qwen3_next,
    "qwen3_5_moe_text": qwen3_next,
    "qwen3_5_text": qwen3_next,
    "qwen3_moe": qwen3_moe,
    "qwen3_next": qwen3_next,
}


for module in FAMILIES.values():
    add_rules(getattr(module, "RULES", ()))


def register(model_type: str, module: ModuleType) -> None:
    """Adds a family."""
    FAMILIES[model_type] = module
    add_rules(getattr(module, "RULES", ()))


def family(model_type: object) -> ModuleType:
    """The module implementing a `model_type`; raises ValueError naming the supported ones, or what this one needs."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        needed = MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
        why = f", which needs {needed}" if needed else ""
        raise ValueError(f"target model_type must be one of {sorted(FAMILIES)}, got {model_type!r}{why}")
    return FAMILIES[model_type]


# Fields that only the config of a drafter has.
OF_DRAFTERS = "dflash_config", "eagle_config", "treeflash_config", "speculators_model_type"


def target_config(raw: Raw) -> TargetConfig:
    """Reads a target's `config.json`; raises ValueError for what is unknown or unsupported."""
    if found := [name for name in OF_DRAFTERS if raw.get(name) is not None]:
        raise ValueError(f"the target's config.json has {found[0]}, so it is a drafter; name the model it was made for")
    return family(raw.get("model_type")).config(raw)
