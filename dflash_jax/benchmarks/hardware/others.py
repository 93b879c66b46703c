"""The same steps by torch, where it is installed: transformers' own decoding, and the official drafter."""

import time
from collections.abc import Callable, Iterator

import jax

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.benchmarks.hardware.bench import Bench
from dflash_jax.benchmarks.hardware.report import SkippedError
from dflash_jax.benchmarks.presets import PAIRS, reduced

STEPS = 20


def torch_steps(bench: Bench) -> Iterator[Figures]:
    """A plain step of transformers' model with random weights, its pass over a block, and the official drafter's."""
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
