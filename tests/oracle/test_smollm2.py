"""A real public model, SmolLM2-135M-Instruct, against transformers, and through the product.

It runs, for minutes, where the environment variable DFLASH_SMOLLM2 names a directory with the model, which is
`HuggingFaceTB/SmolLM2-135M-Instruct` on the hub.
"""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from dflash_jax import Engine, load_target, serve  # noqa: E402
from dflash_jax.infer.text import Text  # noqa: E402
from tests import tiny  # noqa: E402

DIRECTORY = os.environ.get("DFLASH_SMOLLM2", "")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not DIRECTORY, reason="DFLASH_SMOLLM2 names no directory")]
ROOT = Path(__file__).parents[2]
TEXTS = ("README.md", "docs/serving.md", "docs/sampling.md")
QUESTIONS = """
Why is the sky blue?
Write a short poem about a lighthouse.
What is 17 times 23? Show your steps.
Name five rivers in South America and the countries they flow through.
Explain recursion to a child.
Translate to French: "The library opens at nine in the morning."
Write a Python function that reverses the words of a sentence.
Who wrote Pride and Prejudice, and when?
Give me a recipe for pancakes.
Summarise the water cycle in three sentences.
What are the prime numbers below 50?
Describe how a bicycle stays upright.
List the planets of the solar system from the sun outwards.
How do vaccines work?
Write a polite e-mail that declines an invitation to a conference.
What is the difference between a list and a tuple in Python?
Tell me a story about a fox who learns to read.
A train leaves at 14:20 and arrives at 17:05. How long does it take?
Which is heavier, a kilogram of feathers or a kilogram of iron, and why?
Give three tips for sleeping better.
""".strip().splitlines()


@pytest.fixture(scope="module")
def theirs():
    return transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def ours():
    return load_target(DIRECTORY, dtype="float32")


@pytest.fixture(scope="module")
def text():
    return Text(DIRECTORY)


def compared(theirs, prompt, answer, budget):
    """Checks an answer against transformers' greedy one; returns how many tokens were equal, and the gap where a near
    tie ended the comparison."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=budget, do_sample=False)
    expected = out[0, len(prompt) :].tolist()
    apart = next((i for i, (a, b) in enumerate(zip(answer, expected, strict=False)) if a != b), None)
    if apart is None:
        assert len(answer) == len(expected)
        return len(answer), None
    with torch.inference_mode():
        logits = theirs(out[:, : len(prompt) + apart], logits_to_keep=1).logits[0, -1]
    gap = float(logits[expected[apart]] - logits[answer[apart]])
    assert 0 <= gap < 1e-4 * float(logits.abs().max()), f"token {apart} differs, and its logit by {gap}"
    return apart, gap


def test_logits(theirs, ours, text):
    @jax.jit
    def forward(ours, tokens):
        positions = jnp.arange(tokens.shape[1])[None]
        hidden, _, _ = ours.forward(tokens, positions, None, ours.init_cache(1, 1))
        return ours.unembed(hidden)

    for name in TEXTS:
        ids = np.asarray([text.encode((ROOT / name).read_text())[:640]])
        assert ids.shape[1] >= 400
        with torch.inference_mode():
            expected = theirs(torch.tensor(ids)).logits.numpy()
        apart = np.abs(np.asarray(forward(ours, jnp.asarray(ids))) - expected).max() / np.abs(expected).max()
        print(f"{name}: {ids.shape[1]} tokens, logits differ by {apart:.1e} of the largest")
        assert apart < 1e-4


def test_greedy_answers_to_twenty_questions(theirs, ours, text):
    prompts = [text.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    engine = Engine(ours, None, slots=10, max_length=512)
    stops = ours.config.eos_token_ids
    answers = engine.generate([tiny.ask(p, 200, id=str(i), stop_token_ids=stops) for i, p in enumerate(prompts)])
    found = [compared(theirs, p, a.token_ids, 200) for p, a in zip(prompts, answers, strict=True)]
    ties = [gap for _, gap in found if gap is not None]
    print(f"{sum(count for count, _ in found)} tokens are equal; near ties: {ties}")
    assert len(ties) <= 2


def test_a_long_prompt_by_chunks(theirs, ours, text):
    words = "\n\n".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md")))
    prompt = text.encode(words)[:6000]
    assert len(prompt) == 6000
    answer = Engine(ours, None, max_length=6144).generate([tiny.ask(prompt, 40)])[0]
    count, gap = compared(theirs, prompt, answer.token_ids, 40)
    print(f"{count} tokens are equal after 6,000; near tie: {gap}")


def test_a_batch_job(tmp_path, ours, text):
    source = tmp_path / "in.jsonl"
    lines = [{"id": str(i), "messages": [{"role": "user", "content": q}]} for i, q in enumerate(QUESTIONS[:6])]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "out.jsonl"
    arguments = ["--target", DIRECTORY, "--no-speculation", "--input", str(source), "--output", str(output)]
    assert serve.main([*arguments, "--max-new-tokens", "40", "--batch-size", "6"]) == 0
    rows = {row["id"]: row for row in map(json.loads, output.read_text().splitlines())}
    engine = Engine(ours, None, max_length=512)
    for i, question in enumerate(QUESTIONS[:6]):
        prompt = text.encode_chat([{"role": "user", "content": question}])
        asked = tiny.ask(prompt, 40, stop_token_ids=ours.config.eos_token_ids)
        assert rows[str(i)]["token_ids"] == engine.generate([asked])[0].token_ids
        assert rows[str(i)]["text"] == text.decode(rows[str(i)]["token_ids"])


def test_the_official_client(tmp_path, ours, text):
    openai = pytest.importorskip("openai")
    arguments = ["--target", DIRECTORY, "--no-speculation", "--http", "127.0.0.1:0", "--api-key", "key"]
    command = [sys.executable, "-m", "dflash_jax.serve", *arguments, "--max-length", "512"]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, stdout=file)
        try:
            while not (found := re.search(r"answering at (http://127.0.0.1:\d+)/", log.read_text())):
                assert process.poll() is None, log.read_text()
                time.sleep(0.2)
            client = openai.OpenAI(base_url=found[1] + "/v1", api_key="key")
            messages = [{"role": "user", "content": QUESTIONS[0]}]
            whole = client.chat.completions.create(model="any", messages=messages, max_tokens=40, temperature=0)
            stream = client.chat.completions.create(
                model="any", messages=messages, max_tokens=40, temperature=0, stream=True
            )
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        finally:
            process.terminate()
            process.wait(600)
    prompt = text.encode_chat(messages)
    asked = tiny.ask(prompt, 40, stop_token_ids=ours.config.eos_token_ids)
    expected = text.decode(Engine(ours, None, max_length=512).generate([asked])[0].token_ids)
    assert whole.choices[0].message.content == expected
    assert "".join(pieces) == expected
