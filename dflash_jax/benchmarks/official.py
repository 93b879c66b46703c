"""The official torch implementation as a benchmark opponent: `pip install "dflash[local]==0.1.0"`."""

import time
from collections.abc import Sequence
from pathlib import Path

from dflash_jax.benchmarks.arguments import Figures
from dflash_jax.checkpoint import gguf
from dflash_jax.infer.engine.requests import Completion, Request


class Official:
    """`dflash` 0.1.0 and transformers on the same pair, on CPU in float32 with batch 1, greedy.

    Raises:
        ValueError: the package is not installed, or the target is a GGUF file.
    """

    def __init__(self, target: str, drafter: str):
        try:
            import torch
            from dflash.model import DFlashDraftModel
            from transformers import AutoModelForCausalLM
        except ImportError as error:
            raise ValueError('--official needs `pip install "dflash[local]==0.1.0"`') from error
        if (Path(target) / gguf.INDEX).is_file():
            raise ValueError("--official compares checkpoints of safetensors; this target is a GGUF file")
        self._target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._drafter = DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32).eval()

    def dflash(self, request: Request, block_size: int) -> tuple[list[int], list[int], float]:
        """Generated tokens, acceptance lengths and decode seconds (prefill excluded, as it reports them)."""
        import torch
        from dflash import model

        model._cuda_time = time.perf_counter  # its clock synchronizes a GPU that is not there
        out = model.dflash_generate(
            self._drafter,
            self._target,
            torch.tensor([list(request.prompt_token_ids)]),  # pyright: ignore[reportArgumentType] (torch has no narrower type for it)
            request.params.max_new_tokens,
            list(request.params.ends),
            block_size=block_size,
            return_stats=True,
        )
        tokens = out.output_ids[0, len(request.prompt_token_ids) :].tolist()
        return tokens, list(out.acceptance_lengths), out.time_per_output_token * len(tokens)

    def generate(self, request: Request) -> tuple[list[int], float]:
        """Tokens of transformers' `generate` after the first, and their seconds.

        It does not tell prefill and decoding apart, so the time of a one-token call is taken off.
        """
        import torch

        ids = torch.tensor([list(request.prompt_token_ids)])

        def run(count: int) -> tuple[list[int], float]:
            begin = time.perf_counter()
            out = self._target.generate(  # pyright: ignore[reportAttributeAccessIssue] (transformers mixes it in)
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=list(request.params.ends) or None,
            )
            return out[0, ids.shape[1] :].tolist(), time.perf_counter() - begin

        _, first = run(1)
        tokens, seconds = run(request.params.max_new_tokens)
        return tokens[1:], max(seconds - first, 1e-9)


class Opponent:
    """Tallies the official implementation and transformers' generate."""

    def __init__(self, official: Official, block_size: int):
        self.official, self.block_size = official, block_size
        self.drafted: list[tuple[list[int], list[int], float]] = []
        self.plain: list[tuple[list[int], float]] = []

    def run(self, batch: Sequence[Request]) -> None:
        for request in batch:
            if not self.plain:  # the first calls warm up
                self.official.dflash(request, self.block_size)
                self.official.generate(request)
            self.drafted.append(self.official.dflash(request, self.block_size))
            self.plain.append(self.official.generate(request))
        time.sleep(0.5)  # its worker threads spin for a while after the last product

    def figures(self, ours: list[Completion], speculative: Figures, plain: Figures) -> Figures:
        def side(answers: Sequence[tuple], rival: Figures) -> Figures:
            tokens, seconds = sum(len(tokens) for tokens, *_ in answers), sum(seconds for *_, seconds in answers)
            rate = tokens / seconds
            ratio = rival["tokens_per_second"] / rate
            return {"tokens_per_second": rate, "tokens": tokens, "decode_seconds": seconds, "speedup_over": ratio}

        lengths = [n for _, lengths, _ in self.drafted for n in lengths]
        official = side(self.drafted, speculative) | {"tau": sum(lengths) / max(len(lengths), 1)}
        official["equal_outputs"] = sum(a.token_ids == b for a, (b, *_) in zip(ours, self.drafted, strict=True))
        return {"official": official, "transformers": side(self.plain, plain)}
