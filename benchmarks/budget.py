"""What a verification budget brings: `python -m benchmarks.budget TARGET DRAFTER PROMPTS.jsonl... [--problems N]`.

First the proposals of a drafter are recorded, at every token of each answer: a block, and how likely each of its tokens
was said to be right. Then policies are replayed on them, 32 rows that are refilled at random:

    fixed     the first W positions of every row
    budget    the likeliest of all rows, W a row on average, every row with its anchor
    oracle    those that will be right, which nobody knows

Tokens a row-step, and tokens/s by a model of a step of Qwen3-8B on an H100, fitted to six times that were measured
there. At last the engine itself: a budget of W a row beside chains of block size W, while all rows are busy.

PROMPTS have a line {"turns": [question]} or {"question": ...} each; `--problems N` adds problems of the bundled pair.
Each set has the same share of the time, so rows of short answers come more often.
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dflash_jax import Engine, Request, SamplingParams, Text, load_drafter, load_target
from dflash_jax.data.problems import problems
from dflash_jax.decoding.state import State, init_state, without_idle_rows
from dflash_jax.decoding.step import nothing, speculative_step, step_functions
from dflash_jax.infer.engine.params import STOP_WIDTH
from dflash_jax.infer.engine.programs import begin, prefill

WIDTHS = (2, 3, 4, 6, 8)
TEMPERATURES = (0.0, 0.7, 1.0)


class Recorded(NamedTuple):
    """What was proposed along an answer.

    Attributes:
        of: the set that its prompt is of.
        request: that it answers.
        right: of the block after each token of the answer, how many proposals are right, the first ones.
        reached: probability of each of its proposals to be right, as those before it are, as the drafter says.
    """

    of: int
    request: Request
    right: np.ndarray  # [tokens]
    reached: np.ndarray  # [tokens, proposals]


def asked(text: Text, sets: Sequence[Sequence[str]], tokens: int, ends: tuple[int, ...]) -> list[tuple[int, Request]]:
    """A request for every prompt, at the temperatures in turns, and the set that it is of."""
    found = []
    for of, prompts in enumerate(sets):
        for i, prompt in enumerate(prompts):
            messages = [{"role": "user", "content": prompt}]
            ids = text.encode_chat(messages) if text.has_chat_template else text.encode(prompt)
            params = SamplingParams(tokens, TEMPERATURES[i % 3], eos_token_ids=ends)
            found.append((of, Request(ids, params, id=f"{of} {i}")))
    return found


def recorded(target: Any, drafter: Any, calibration: Any, of: Sequence[tuple[int, Request]]) -> list[Recorded]:
    """What the drafter proposes along the answers to these requests, its calibration as given."""
    block, rows = drafter.config.block_size, len(of)
    functions = step_functions(target, drafter, block, budget=block - 1)
    plain = functions._replace(propose=nothing, narrow=lambda state, block: block)

    @partial(jax.jit, donate_argnums=0)
    def step(state: State) -> tuple[State, Any]:
        view = without_idle_rows(state)
        proposal = functions.propose(view, functions.choose(view))
        state, committed = speculative_step(plain, state)
        return state, (committed.tokens[:, 0], committed.count, proposal.tokens, proposal.scores)

    longest = max(len(request.prompt_token_ids) + request.params.max_new_tokens for _, request in of)
    chunk = 1 << (max(len(request.prompt_token_ids) for _, request in of) - 1).bit_length()
    state = init_state(target, drafter, rows, longest + block, STOP_WIDTH, chunk)
    state = state.replace(calibration=jax.tree.map(jnp.copy, calibration).replace(frozen=True))
    answers: list[list[int]] = []
    for row, (_, request) in enumerate(of):
        count = len(request.prompt_token_ids)
        padded = np.zeros((1, chunk), np.int32)
        padded[0, :count] = request.prompt_token_ids
        settings = request.params.on_device(request.id, 0, 0, request.params.max_new_tokens, count)
        where = np.asarray([row]), padded, np.asarray([count]), np.asarray([True])
        state, first = prefill(target, drafter, begin(state, np.int32(row), np.int32(0)), *where, (settings,))
        answers.append([int(first.tokens[0, 0])])
    blocks: list[list[np.ndarray]] = [[] for _ in of]
    scores: list[list[np.ndarray]] = [[] for _ in of]
    while np.any(np.asarray(state.remaining) > 0):
        state, found = step(state)
        token, count, proposed, score = jax.device_get(found)
        for row in np.nonzero(count)[0]:
            answers[row].append(int(token[row]))
            blocks[row].append(proposed[row])
            scores[row].append(score[row])
    made = []
    for row, (which, request) in enumerate(of):
        truth = np.asarray(answers[row][1:])
        right = []
        for i, tokens in enumerate(blocks[row]):
            known = truth[i : i + len(tokens)]
            wrong = np.nonzero(tokens[: len(known)] != known)[0]
            right.append(int(wrong[0]) if wrong.size else len(known))
        if right:
            made.append(Recorded(which, request, np.asarray(right), np.exp(np.cumsum(scores[row], axis=1))))
    return made


def milliseconds(rows: int, verified: int, slots: int) -> float:
    """A step of Qwen3-8B with contexts of 1,024 on an H100: fitted to 7.1, 7.3 and 9.8 ms of plain steps of 1, 8 and 32
    rows, and 8.7, 10.9 and 22.2 ms with blocks of 16 (2026-11-26). Products and bytes overlap in part."""
    overlapped = lambda gigabytes, gigaflops: ((gigabytes / 2.27) ** 1.5 + (gigaflops / 608) ** 1.5) ** (1 / 1.5)
    verify = 0.3 + overlapped(15.1, 15.14 * verified) + rows * 0.151 / 2.27
    return verify + (0.56 + overlapped(3.3, 3.17 * slots * rows) if slots else 0.0)


def drawn(rng: np.random.Generator, answers: Sequence[Recorded], sets: int) -> Recorded:
    """An answer, so that each set fills as much of the time."""
    of_set = [[a for a in answers if a.of == which] for which in range(sets)]
    steps = [np.mean([len(a.right) / (1 + np.minimum(a.right, 3).mean()) for a in one]) for one in of_set]
    one = of_set[rng.choice(sets, p=(1 / np.asarray(steps)) / np.sum(1 / np.asarray(steps)))]
    return one[rng.integers(len(one))]


def replayed(
    policy: str, width: int, answers: Sequence[Recorded], sets: int, rows: int = 32, steps: int = 4000
) -> float:
    """Tokens a row-step of a policy."""
    rng, tokens = np.random.default_rng(0), 0
    lines = [(drawn(rng, answers, sets), 0) for _ in range(rows)]
    for _ in range(steps):
        right = np.asarray([answer.right[at] for answer, at in lines])
        if policy == "fixed":
            verified = np.full(rows, width - 1)
        else:
            depth = lines[0][0].reached.shape[1]
            worth = np.stack([answer.reached[at] for answer, at in lines])
            if policy == "oracle":
                worth = (np.arange(depth)[None] < right[:, None]) * (1 - np.arange(depth)[None] / 1000)
            best = np.argsort(-worth, axis=None, kind="stable")[: rows * (width - 1)]
            verified = np.bincount(best // depth, minlength=rows)
        for row, (answer, at) in enumerate(lines):
            committed = 1 + min(right[row], verified[row])
            left = len(answer.right) - at
            tokens += min(committed, left)
            lines[row] = (answer, at + committed) if committed < left else (drawn(rng, answers, sets), 0)
    return tokens / (rows * steps)


def measured(engine: Engine, requests: Sequence[Request]) -> float:
    """Tokens a row-step while all rows are busy."""
    tickets = [engine.submit(request) for request in requests]
    while engine.waiting:
        engine.step()
    engine.cancel(*tickets)
    return engine.stats.decode_tokens / engine.stats.row_steps


def questions(path: Path, most: int) -> list[str]:
    found = []
    for line in islice(path.read_text().splitlines(), most):
        fields = json.loads(line)
        found.append(fields["turns"][0] if "turns" in fields else fields["question"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("drafter")
    parser.add_argument("prompts", nargs="*", type=Path)
    parser.add_argument("--problems", type=int, default=0)
    parser.add_argument("--most", type=int, default=32, help="prompts of a file")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--requests", type=int, default=160, help="of a run of the engine")
    options = parser.parse_args()
    target, drafter, text = load_target(options.target), load_drafter(options.drafter), Text(options.target)
    sets = [questions(path, options.most) for path in options.prompts]
    sets += [[problem.question for problem in islice(problems(2, held_out=True), options.problems)]]
    sets, block = [one for one in sets if one], drafter.config.block_size
    requests = asked(text, sets, options.tokens, tuple(target.config.eos_token_ids))
    longest = max(len(request.prompt_token_ids) for _, request in requests) + options.tokens
    given: dict[str, Any] = {"slots": options.rows, "max_length": longest}

    first = Engine(target, drafter, verify_budget=4, **given)
    first.generate([request for _, request in requests])
    calibration = jax.tree.map(jnp.copy, first.batch.state.calibration)
    answers = []
    for begin_at in range(0, len(requests), options.rows):
        answers += recorded(target, drafter, calibration, requests[begin_at : begin_at + options.rows])
    print(f"{len(answers)} answers of {len(sets)} sets, {sum(len(a.right) for a in answers)} blocks of {block}")
    print("replayed, tokens a row-step (thousand tokens/s by the model)")
    for width in WIDTHS:
        found = {policy: replayed(policy, width, answers, len(sets)) for policy in ("fixed", "budget", "oracle")}
        slots = {"fixed": width, "budget": block, "oracle": block}
        rates = {
            p: t * options.rows / milliseconds(options.rows, width * options.rows, slots[p]) for p, t in found.items()
        }
        print(f"  W {width}: " + ", ".join(f"{p} {t:.2f} ({rates[p]:.2f})" for p, t in found.items()), end="")
        print(f"; budget {found['budget'] / found['fixed'] - 1:+.1%}")

    rng = np.random.default_rng(1)
    mixed = []
    for i in range(options.requests):
        one = drawn(rng, answers, len(sets)).request
        mixed.append(Request(one.prompt_token_ids, one.params, id=f"{one.id} {i}"))
    print("the engine, tokens a row-step")
    for width in (3, 4):
        chain = measured(Engine(target, drafter, block_size=width, **given), mixed)
        budget = measured(Engine(target, drafter, block_size=block, verify_budget=width, **given), mixed)
        print(f"  W {width}: chain of {width} {chain:.2f}, budget {budget:.2f} ({budget / chain - 1:+.1%})", flush=True)


if __name__ == "__main__":
    main()
