"""The model card of an exported drafter: a README.md with what the hub, and its readers, want to know."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from dflash_jax.config import Raw
from dflash_jax.drafters import kind_of
from dflash_jax.drafters.base import Drafter
from dflash_jax.files import Json, read_json
from dflash_jax.train.metrics import Metrics, read_metrics

TARGET = "target_model_name_or_path"  # in the drafter's config.json
_IN_VLLM = """\
In vLLM and SGLang, where they have this kind of drafter:

    vllm serve {target} --speculative-config '{{"method": "dflash", "model": "DIR", "num_speculative_tokens": {draft}}}'
    python -m sglang.launch_server --model-path {target} \\
        --speculative-algorithm DFLASH --speculative-draft-model-path DIR
"""
_SPECULATORS_IN_VLLM = """\
In vLLM, which finds the target by its name in `config.json`:

    vllm serve DIR
"""
_SPECULATORS_BESIDE = """\
In vLLM:

    vllm serve {target} --speculative-config '{{"model": "DIR", "num_speculative_tokens": {draft}}}'
"""


def card(
    drafter: Drafter, raw: Raw, run: Path, license_name: str | None, data: str | None, *, speculators: bool = False
) -> str:
    """The card of the drafter of a run.

    Args:
        raw: the drafter's `config.json`.
        run: its directory.
        license_name: as the hub names licenses, such as apache-2.0; None leaves it open.
        data: what it was trained on, in words; None leaves it open.
        speculators: whether it is written in the layout of that library.
    """
    named, kind, size = str(raw.get(TARGET) or "its target"), kind_of(raw), drafter.config.block_size
    of_hub = named.count("/") == 1 and not named.startswith((".", "/", "~")) and not Path(named).exists()
    target = named if of_hub else Path(named).name  # where it lies on this machine is nobody's affair
    settings, metrics = read_json(run / "config.json"), read_metrics(run / "metrics.jsonl")
    head: Json = {"license": license_name} if license_name else {}
    head |= {"base_model": named} if of_hub else {}
    head |= {"library_name": "dflash_jax", "tags": ["speculative-decoding", "dflash"]}
    trained = [f"{metrics[-1]['step']} steps"] if metrics else []
    trained += [f"batches of {settings.get('batch_size')} sequences of {settings.get('length')} tokens"]
    trained += [f"data: {data}"] if data else []
    elsewhere = _IN_VLLM if kind == "dflash" else ""
    if speculators:
        elsewhere = _SPECULATORS_IN_VLLM if of_hub else _SPECULATORS_BESIDE
    lines = [
        "---",
        yaml.safe_dump(head, sort_keys=False).rstrip(),
        "---",
        "",
        f"# A {kind} drafter for {target}",
        "",
        f"It proposes {size - 1} tokens a step (block size {size}) for speculative decoding; the answers stay those of",
        f"`{target}`. Trained with dflash_jax ({', '.join(trained)}).",
        "",
        *_figures(metrics),
        "## Use",
        "",
        f"    dflash-jax serve --target {target} --drafter DIR",
        "",
        *elsewhere.format(target=target, draft=size - 1).splitlines(),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _figures(metrics: Sequence[Metrics]) -> list[str]:
    """What real decoding of held-out prompts gave on the way."""
    found = [(line["step"], line["tau"]) for line in metrics if line.get("tau") is not None]
    if not found:
        return []
    rows = [f"| {step} | {tau:.2f} |" for step, tau in found]
    return ["| training step | tau on held-out prompts |", "|---|---|", *rows, ""]
