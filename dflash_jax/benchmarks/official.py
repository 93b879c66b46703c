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
            raise ValueError('the comparison needs `pip install "dflash[local]==0.1.0"`') from error
        if (Path(target) / gguf.INDEX).is_file():
            raise ValueError("--official compares checkpoints of safetensors; this target is a GGUF file")
        self._target = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._drafter = DFlashDraftModel.from_pretrained(drafter, dtype=torch.float32).eval()

    def dflash(
        self, prompt: Sequence[int], max_new_tokens: int, stop: Sequence[int], block_size: int
    ) -> tuple[list[int], list[int], float]:
        """Generated tokens, acceptance lengths and decode seconds (prefill excluded, as it reports them)."""
        import torch
        from dflash import model

        model._cuda_time = time.perf_counter  # its clock synchronises a GPU that is not there
        out = model.dflash_generate(
            self._drafter,
            self._target,
            torch.tensor([list(prompt)]),  # pyright: ignore[reportArgumentType] (torch has no narrower type for it)
            max_new_tokens,
            list(stop),
            block_size=block_size,
            return_stats=True,
        )
        tokens = out.output_ids[0, len(prompt) :].tolist()
        return tokens, list(out.acceptance_lengths), out.time_per_output_token * len(tokens)

    def generate(self, prompt: Sequence[int], max_new_tokens: int, stop: Sequence[int]) -> tuple[list[int], float]:
        """Tokens of transformers' `generate` after the first, and their seconds.

        It does not tell prefill and decoding apart, so the time of a one-token call is taken off.
        """
        import torch

        ids = torch.tensor([list(prompt)])

        def run(count: int) -> tuple[list[int], float]:
            begin = time.perf_counter()
            out = self._target.generate(  # pyright: ignore[reportAttributeAccessIssue] (transformers mixes it in)
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=list(stop) or None,
            )
            return out[0, len(prompt) :].tolist(), time.perf_counter() - begin

        _, first = run(1)
        tokens, seconds = run(max_new_tokens)
        return tokens[1:], max(seconds - first, 1e-9)


class Opponent:
    """Tallies the official implementation and transformers' generate."""

    def __init__(self, official: Official, block_size: int):
        self.official, self.block_size = official, block_size
        self.tokens: list[list[int]] = []
        self.lengths: list[int] = []
        self.seconds = self.generate_seconds = 0.0
        self.generate_tokens = 0
        self.warm = False

    def run(self, batch: Sequence[Request]) -> None:
        for request in batch:
            arguments = (request.prompt_token_ids, request.params.max_new_tokens, request.params.ends)
            if not self.warm:
                self.official.dflash(*arguments, self.block_size)
                self.official.generate(*arguments)
                self.warm = True
            tokens, lengths, seconds = self.official.dflash(*arguments, self.block_size)
            self.tokens.append(tokens)
            self.lengths += lengths
            self.seconds += seconds
            tokens, seconds = self.official.generate(*arguments)
            self.generate_tokens += len(tokens)
            self.generate_seconds += seconds
        time.sleep(0.5)  # its worker threads spin for a while after the last product

    def figures(self, ours: list[Completion], speculative: Figures, plain: Figures) -> Figures:
        def side(tokens: int, seconds: float, rival: Figures) -> Figures:
            rate = tokens / seconds
            return {
                "tokens_per_second": rate,
                "tokens": tokens,
                "decode_seconds": seconds,
                "speedup_over": rival["tokens_per_second"] / rate,
            }

        official = side(sum(map(len, self.tokens)), self.seconds, speculative)
        official["tau"] = sum(self.lengths) / max(len(self.lengths), 1)
        official["equal_outputs"] = sum(a.token_ids == b for a, b in zip(ours, self.tokens, strict=True))
        return {
            "official": official,
            "transformers": side(self.generate_tokens, self.generate_seconds, plain),
        }
