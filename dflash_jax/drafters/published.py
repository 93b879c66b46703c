"""Which layers of their targets published drafters tap, by their ids on the hub.

They are chosen in training, and no formula finds them again: the reference's is wrong for 14 of 20 drafters that z-lab
has published (z-lab/dflash#156). Each says them in its config.json; where a copy does not, they are known from here.
"""

from dflash_jax.config import Raw

# As reports quote the config.json files: z-lab/dflash#156 and lmdeploy#4789 (Qwen3), AdaFlash#1 (Coder), sglang#37475
# (DFlash 2); DeepSpec's own configs for `deepseek-ai`. Llama and gpt-oss: benchmarks on those checkpoints.
TAPS: dict[str, tuple[int, ...]] = {
    "z-lab/Qwen3-4B-DFlash-b16": (1, 9, 17, 25, 33),
    "z-lab/Qwen3-8B-DFlash-b16": (1, 9, 17, 25, 33),
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": (1, 8, 15, 22, 29),
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": (1, 12, 23, 34, 45),
    "z-lab/gpt-oss-20b-DFlash": (1, 6, 11, 16, 21),
    "z-lab/Qwen3.8-27B-DFlash2": (5, 19, 33, 47, 61),
    "deepseek-ai/dflash_qwen3_4b_block7": (1, 9, 17, 25, 33),
    "deepseek-ai/dflash_qwen3_8b_block7": (1, 9, 17, 25, 33),
    "deepseek-ai/dflash_qwen3_14b_block7": (1, 10, 19, 28, 37),
    "deepseek-ai/dspark_qwen3_4b_block7": (1, 9, 17, 25, 33),
    "deepseek-ai/dspark_qwen3_8b_block7": (1, 9, 17, 25, 33),
    "deepseek-ai/dspark_qwen3_14b_block7": (1, 10, 19, 28, 37),
}


def completed(raw: Raw, source: str) -> Raw:
    """A drafter's `config.json` with what is known of it by its id on the hub, where it says nothing itself.

    Args:
        source: its id, or anything else: then nothing is known.
    """
    named = (raw, *(inside for inside in raw.values() if isinstance(inside, dict)))
    if source not in TAPS or any(
        value is not None and name.endswith("_layer_ids") for fields in named for name, value in fields.items()
    ):
        return raw
    return {**raw, "target_layer_ids": list(TAPS[source])}
