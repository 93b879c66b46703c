// Recordings: what a request sent, step by step, with the times at which it came.

/** An error that the server sent, with the field of the request that it is about. */
export class ServerError extends Error {
  constructor(said, status = 0) {
    super(said.message);
    Object.assign(this, {param: said.param || null, code: said.code || null, status});
  }
}

export async function refused(reply) {
  let said = {message: `the server answered with status ${reply.status}`};
  try { said = (await reply.json()).error; } catch { /* it is no JSON */ }
  return new ServerError(said, reply.status);
}

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      if (data.startsWith("{")) yield JSON.parse(data);
    }
  }
}

/**
 * Sends a request and records the answer.
 *
 * `steps` has [milliseconds, tokens, text, draft] of each step; the first entry is the token that comes from the prompt.
 * Times count from the first token on. `most` is the largest block size that was asked for, or null. `drafts` has what was run, and `draft` is an index of it, or -1.
 */
export class Recording {
  constructor(most) {
    Object.assign(this, {most, baseline: most === 1, steps: [], drafts: [], content: "", report: null, ttft: null, finish: null, ended: false});
  }

  async record(path, asked, headers, signal, changed) {
    const sent = performance.now();
    let before = 0;
    try {
      const reply = await fetch(path, {method: "POST", headers, body: JSON.stringify(asked), signal});
      if (!reply.ok) throw await refused(reply);
      for await (const event of events(reply)) {
        if (event.error) throw new ServerError(event.error);
        const now = performance.now() - sent;
        for (const choice of event.choices || []) this.#add(choice, before, now);
        if (event.speculation) {
          const {acceptance_lengths, ...report} = event.speculation;
          this.report = report;
        }
        if (event.metrics) this.ttft = event.metrics.time_to_first_token_ms;
        before = now;
        changed();
      }
      this.ended = true;
    } finally {
      this.#settle();
    }
  }

  #add(choice, before, now) {
    const fresh = choice.steps || [];
    this.content += choice.delta?.content ?? choice.text ?? "";
    if (choice.finish_reason) this.finish = choice.finish_reason;
    let draft = -1;
    if (choice.draft) {
      const name = JSON.stringify(choice.draft);
      draft = this.drafts.findIndex(known => JSON.stringify(known) === name);
      if (draft < 0) draft = this.drafts.push(choice.draft) - 1;
    }
    fresh.forEach(([count, text], i) => {
      const last = this.steps.at(-1);
      if (!count && last) last[2] += text;  // of an earlier step, which had to wait
      else if (count) this.steps.push([before + (now - before) * (i + 1) / fresh.length, count, text, last ? draft : -1]);
    });
    if (this.ttft === null && this.steps.length) this.ttft = now;
  }

  /** Makes the times count from the first token on, and last as long as the server says. */
  #settle() {
    if (!this.steps.length) return;
    const first = this.steps[0][0], took = this.steps.at(-1)[0] - first;
    const seconds = this.report?.decode_seconds ?? took / 1000, parts = this.steps.length - 1;
    this.steps.forEach((step, i) => {
      step[0] = 1000 * seconds * (took > 0 ? (step[0] - first) / took : parts && i / parts);
    });
  }
}

export const textOf = recording => recording.steps.map(step => step[2]).join("");
export const lasted = recording => recording.steps.length ? recording.steps.at(-1)[0] : 0;
export const proposed = (recording, step) => step[3] < 0 ? 0 : recording.drafts[step[3]].proposed;
export const speculated = recording => recording.steps.some(step => proposed(recording, step) > 0);

/** Figures of the first so many entries; of the time that passed, where the answer is still on its way. */
export function figures(recording, shown = recording.steps.length, milliseconds = null) {
  const seen = recording.steps.slice(0, shown), steps = Math.max(0, seen.length - 1);
  const tokens = seen.reduce((sum, step) => sum + step[1], 0);
  const seconds = (milliseconds ?? lasted(recording)) / 1000;
  const whole = milliseconds === null && recording.report;
  const rate = whole ? recording.report.tokens_per_second : steps && seconds > 0 ? (tokens - 1) / seconds : null;
  return {tokens, steps, rate, tau: steps ? (tokens - 1) / steps : null, seconds};
}

export const rounded = rate => rate.toFixed(rate < 10 ? 1 : 0);
const plural = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;

function named({block_size, tree, budget, proposed}) {
  if (!proposed) return "no speculation";
  return `block size ${block_size}` + (tree ? `, tree of ${plural(tree, "token")}` : "")
    + (budget ? `, verification budget ${budget}` : "");
}

/** What was run for an answer, in words; `auto` is whether the server chose it. */
export function ran(recording, auto) {
  const counts = new Map();
  for (const step of recording.steps)
    if (step[3] >= 0) counts.set(named(recording.drafts[step[3]]), (counts.get(named(recording.drafts[step[3]])) || 0) + 1);
  if (!counts.size) return "";
  const all = [...counts.values()].reduce((a, b) => a + b), found = [...counts].sort((a, b) => b[1] - a[1]);
  if (recording.baseline) return "speculation off: one token per step";
  const parts = found.map(([name, count]) => found.length === 1 ? name : `${name} (${count} of ${plural(all, "step")})`);
  return (auto ? `auto${recording.most ? ` up to block size ${recording.most}` : ""} chose ` : "ran with ") + parts.join("; ");
}

/** How the speeds of two finished answers compare: a few large words, and a sentence. */
export function compared(first, second, {auto, dtype}) {
  const a = textOf(first), b = textOf(second), at = differs(a, b);
  let said = at < 0 ? "Both texts are identical." : `The texts differ from character ${at + 1} on.`;
  if (at >= 0 && dtype !== "float32")
    said += ` In ${dtype}, steps of different widths round differently; in float32 the texts are identical.`;
  const rates = [first, second].map(one => one.report?.tokens_per_second);
  if (!speculated(first)) {
    const chosen = auto ? "The server’s auto mode chose no speculation for this answer" : "No draft tokens were proposed for this answer";
    const anyway = auto ? " To see speculation all the same, start the server with --block-size and a number." : "";
    return {large: "No speculation", said: `${chosen}, so both answers were decoded one token per step and any difference in speed is noise. ${said}${anyway}`};
  }
  if (!rates.every(Boolean)) return {large: "", said};
  if (![first, second].every(one => one.report.alone))
    return {large: "", said: `Other requests ran at the same time, so the speeds do not compare. ${said}`};
  const speeds = `${rounded(rates[0])} instead of ${rounded(rates[1])} tokens/s`, all = first.steps.length - 1;
  const some = first.steps.filter(step => proposed(first, step)).length;
  if (some < all / 2)
    return {large: `Speculation in ${some} of ${all} steps`, said: `auto chose no speculation for the others: ${speeds}, of which little is due to speculation. ${said}`};
  return {large: faster(rates[0] / rates[1]), said: `${speeds}. ${said}`};
}

function faster(ratio) {
  const percent = Math.round(100 * Math.abs(ratio - 1));
  if (!percent) return "As fast as without speculation";
  if (ratio < 1) return `${percent}% slower with speculation`;
  return ratio < 1.5 ? `${percent}% faster with speculation` : `${ratio.toFixed(1)}× as fast with speculation`;
}

/** The first character, of the code points, at which two texts differ; -1 if they do not. */
export function differs(a, b) {
  if (a === b) return -1;
  const [x, y] = [[...a], [...b]];
  let at = 0;
  while (x[at] === y[at]) at += 1;
  return at;
}
