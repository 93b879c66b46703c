# %% [markdown]
# # Reinforcement learning with speculative rollouts
#
# A small model learns from a reward that a program computes: whether the answer to a word problem is right. Most of
# the time of such a training goes into *rollouts*, the answers that the model samples, and a drafter makes them
# faster. It changes nothing else: samples are those of autoregressive decoding, seed for seed, so the trained
# weights are the same to the last bit. The second half shows that.
#
# The loop is GRPO (group relative policy optimization, arXiv 2402.03300) in plain JAX and optax: several answers to
# each prompt, whose rewards are compared within the group. The model is the small one inside the package. At
# temperature 1.5 it is right in about four of five answers, and the training raises that. `colab/rl_rollouts.py` is
# this notebook as a script.

# %%
import os
import time
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dflash_jax
from dflash_jax.data.problems import is_correct, problems

SMOKE = os.environ.get("SMOKE") == "1"
STEPS = 20
PROMPTS, SAMPLES = (2, 4) if SMOKE else (8, 8)
TEMPERATURE, MAX_NEW_TOKENS = 1.5, 48 if SMOKE else 96
LEARNING_RATE = 5e-5
WIDTH = 256  # tokens of a row in the loss

# %% [markdown]
# ## Model, prompts, reward
#
# The policy is trained in float32. A question becomes a prompt by the model's chat template.

# %%
target_directory, drafter_directory = dflash_jax.bundled_pair()
target = dflash_jax.load_target(target_directory, dtype="float32")
drafter = dflash_jax.load_drafter(drafter_directory, dtype="float32")
text = dflash_jax.Text(target_directory)
sampling = dflash_jax.SamplingParams(MAX_NEW_TOKENS, TEMPERATURE, eos_token_ids=target.config.eos_token_ids)


def asked(step):
    """The problems of a step."""
    return list(islice(problems(seed=step), PROMPTS))


def prompt(problem):
    return text.encode_chat([{"role": "user", "content": problem.question}])


def rewards(batch, made):
    """1 for every right answer, [N]."""
    answers = [text.answer(completion.token_ids) or "" for completion in made.completions]
    right = [is_correct(batch[group], answer) for group, answer in zip(made.groups, answers, strict=True)]
    return np.asarray(right, np.float32)


# %% [markdown]
# ## Loss
#
# The advantage of an answer is its reward against those of its group. The loss computes log-probabilities in a pass
# of its own, in the distribution that was sampled from (at this temperature, over the tokens that can be decoded).
# There is one update for each batch, so the ratio of the new policy to the old one is 1, and only its gradient
# counts.
#
# The rollouts bring log-probabilities, too (`made.logprobs`). They are shown beside those of the loss, as a check; a
# loss with several updates for each batch would take them for the old policy.


# %%
def answer_logprobs(params, tokens):
    """Of every token given those before it, [N, L]; 0 for the first one."""
    model = target.replace(params=params)
    N, L = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(L)[None], (N, L))
    hidden, _, _ = model.forward(tokens, positions, None, model.init_cache(N, 0))  # a causal pass without a cache
    logits = model.unembed(hidden[:, :-1]) / TEMPERATURE
    if model.decodable is not None:
        logits = jnp.where(model.decodable, logits, -jnp.inf)
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=2)[..., 0]
    return jnp.pad(logprobs, ((0, 0), (1, 0)))


def loss(params, tokens, mask, advantages):
    """The mean over answer tokens, and the log-probabilities."""
    logprobs = answer_logprobs(params, tokens)
    ratio = jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
    gain = jnp.where(mask, ratio * advantages[:, None], 0.0)
    return -jnp.sum(gain) / jnp.maximum(jnp.sum(mask), 1), logprobs


def advantages_of(reward):
    """Each reward against its group, in standard deviations."""
    groups = reward.reshape(PROMPTS, SAMPLES)
    spread = groups - groups.mean(axis=1, keepdims=True)
    return (spread / (groups.std(axis=1, keepdims=True) + 1e-6)).reshape(-1)


optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE))


@jax.jit
def update(params, state, tokens, mask, advantages):
    (value, logprobs), gradient = jax.value_and_grad(loss, has_aux=True)(params, tokens, mask, advantages)
    changes, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, changes), state, value, logprobs


# %% [markdown]
# ## Training
#
# `engine.update` puts the new weights in the place of the old ones; nothing is compiled again. The drafter stays as
# it is: its proposals fit a little less as the policy moves, which `tau`, the tokens that a step accepts, shows.


# %%
def train(drafter):
    """Trains from the model as it is; returns the parameters, the sampled tokens of every step, and figures."""
    slots = min(PROMPTS * SAMPLES, 8)
    engine = dflash_jax.Engine(target, drafter, slots=slots, max_length=WIDTH, logprobs=0, sampled_logprobs=True)
    engine.warm_up()
    params, state, samples, figures = target.params, optimizer.init(target.params), [], []
    for step in range(STEPS):
        batch = asked(step)
        begin = time.perf_counter()
        made = dflash_jax.rollouts(engine, list(map(prompt, batch)), SAMPLES, sampling, step=step, width=WIDTH)
        seconds = time.perf_counter() - begin
        reward = rewards(batch, made)
        given = made.tokens, made.mask, advantages_of(reward)
        params, state, value, logprobs = update(params, state, *given)
        engine.update(target=params)
        apart = np.abs(np.where(made.mask, logprobs - made.logprobs, 0)).max()
        samples.append(made.tokens)
        figures.append({"reward": reward.mean(), "tau": made.stats.tau, "steps": made.stats.steps, "seconds": seconds})
        print(
            f"step {step + 1:2}: reward {reward.mean():.2f}, loss {float(value):+.4f}, tau {made.stats.tau or 1:.2f}, "
            f"{made.stats.steps} device steps in {seconds:.2f} s, log-probabilities within {apart:.0e}"
        )
    return params, samples, figures


print("with the drafter")
params, samples, figures = train(drafter)

# %% [markdown]
# ## The same without a drafter
#
# The same seeds give the same samples, hence the same loss, the same gradient and the same weights: bit for bit.

# %%
print("without a drafter")
plain_params, plain_samples, plain_figures = train(None)
for tokens, plain_tokens in zip(samples, plain_samples, strict=True):
    np.testing.assert_array_equal(tokens, plain_tokens)
jax.tree.map(np.testing.assert_array_equal, params, plain_params)
assert any(jnp.any(a != b) for a, b in zip(*map(jax.tree.leaves, (params, target.params)), strict=True))

total = lambda rows, name: sum(row[name] for row in rows)
mean = lambda rows, name: f"{np.mean([row[name] for row in rows]):.2f}"
few = STEPS // 4 or 1
print(f"samples and weights are the same after {STEPS} steps")
for name in ("reward", "tau"):
    print(f"{name} of the first {few} steps {mean(figures[:few], name)}, of the last {mean(figures[-few:], name)}")
print(
    f"rollouts: {total(plain_figures, 'seconds') / total(figures, 'seconds'):.2f} times as fast with the drafter, "
    f"with {total(figures, 'steps')} device steps in place of {total(plain_figures, 'steps')}"
)
