"""The same steps by torch, where it is installed: transformers' own, and those of the official implementation."""

import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from itertools import pairwise
from typing import Any

import jax

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.hardware.bench import Bench
from dflash_jax.benchmarks.hardware.report import SkippedError
from dflash_jax.benchmarks.presets import PAIRS, reduced
from dflash_jax.config import Raw

STEPS = 20


def torch_steps(bench: Bench) -> Iterator[Figures]:
    """A plain step of transformers' model, its pass over a block, and an official speculative step; random weights."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
    except ImportError as error:
        raise SkippedError(f"{error.name} is not installed") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and jax.default_backend() != "cpu":
        raise SkippedError("the torch that is installed does not see the device")
    bench.clear()
    raw = reduced(*PAIRS[bench.pair]) if bench.small else PAIRS[bench.pair]
    fields = {key: value for key, value in raw[0].items() if key != "model_type"}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    config = AutoConfig.for_model(raw[0]["model_type"], **fields)
    with torch.device(device), torch.no_grad():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        block = raw[1]["block_size"]
        for name, width in (("plain step", 1), (f"pass over a block of {block}", block)):
            tokens, context = torch.zeros((1, width), dtype=torch.long), bench.context(1024)
            cache = DynamicCache(config=config)
            model(torch.zeros((1, context), dtype=torch.long), past_key_values=cache)

            def step(tokens=tokens, cache=cache, context=context) -> None:
                model(tokens, past_key_values=cache)
                cache.crop(context)

            yield {"torch": f"transformers, {name}", "ms": _milliseconds(step, torch)}
        yield _official_step(model, raw[1], bench.context(1024), dtype)


def _official_step(target: Any, raw: Raw, context: int, dtype: object) -> Figures:
    """A step of `dflash_generate`, which drafts and verifies a whole block, with a drafter of random weights.

    It is the median time from one verification to the next.
    """
    import torch

    try:
        from dflash import model
        from transformers import Qwen3Config
    except ImportError:
        return {"torch": "dflash, left out: the package is not installed"}
    drafter = model.DFlashDraftModel._from_config(Qwen3Config(**raw), dtype=dtype).eval()
    wait, block = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None, raw["block_size"]
    begun = list[float]()

    def beginning(_: object, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].shape[1] == block:  # no prompt, and no shorter block at the end
            wait()
            begun.append(time.perf_counter())

    hook = target.register_forward_pre_hook(beginning)
    prompt = torch.zeros((1, context), dtype=torch.long)
    model.dflash_generate(drafter, target, prompt, STEPS + block, None)  # pyright: ignore[reportArgumentType] (no narrower type)
    hook.remove()
    times = sorted(after - before for before, after in pairwise(begun[1:]))  # the first steps warm up
    return {"torch": f"dflash {version('dflash')}, speculative step", "ms": 1e3 * times[len(times) // 2]}


def _milliseconds(step: Callable[[], None], torch: object) -> float:
    cuda = torch.cuda  # type: ignore[attr-defined]
    wait = cuda.synchronize if cuda.is_available() else lambda: None
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        step()
        wait()
        times.append(time.perf_counter() - begin)
    return 1e3 * sorted(times)[STEPS // 2]
