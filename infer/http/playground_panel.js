// How an answer is shown: large figures, what was run, its text, and its steps.
import {differs, figures, lasted, proposed, ran, rounded, speculated, textOf} from "./playground_recording.js";
import {markdown} from "./playground_markdown.js";

export function element(name, fields = {}, ...children) {
  const made = Object.assign(document.createElement(name), fields);
  made.append(...children);
  return made;
}

const PAINT = 100;  // milliseconds between two renderings of Markdown
const FIGURES = [["rate", "tokens/s"], ["tau", "acceptance length τ"], ["ttft", "time to first token"], ["tokens", "tokens"]];
const MOST_LABELS = 10;  // lengths of which a histogram has room for all labels

export class Panel {
  /** `about` is what the server says of itself, `view` whether "tokens" or "markdown" is shown. */
  constructor(recording, about, view) {
    Object.assign(this, {recording, about, view, shown: 0, spans: [], several: [], painted: -PAINT, apart: -1});
    this.title = element("h3");
    this.state = element("span", {className: "state"});
    this.values = {};
    this.labels = {};
    const list = element("dl", {className: "figures"});
    for (const [name, label] of FIGURES)
      list.append(element("div", {}, this.labels[name] = element("dt", {textContent: label}), this.values[name] = element("dd", {textContent: "–"})));
    this.ran = element("p", {className: "ran"});
    this.text = element("div", {className: "text"});
    this.note = element("p", {className: "note", role: "status"});
    this.strip = element("div", {className: "strip"});
    this.histogram = element("div", {className: "histogram"});
    this.graphs = element("div", {className: "graphs", hidden: true},
      element("figure", {}, element("figcaption", {textContent: "Tokens of each step; pale: proposed, not accepted"}), this.strip),
      element("figure", {}, element("figcaption", {textContent: "Steps by acceptance length"}), this.histogram));
    this.copied = element("button", {type: "button", className: "copy", textContent: "Copy"});
    this.copied.addEventListener("click", () => this.#copy());
    this.root = element("section", {className: `answer ${recording.baseline ? "second" : "first"}`},
      element("header", {}, this.title, this.state), list, this.ran, this.text, this.note, this.graphs,
      element("footer", {}, this.copied));
    for (const part of [this.text, this.strip])
      part.addEventListener("click", event => event.target.dataset.step && this.#tell(Number(event.target.dataset.step)));
    this.#titled();
  }

  /** That another answer comes first. */
  queued() {
    this.root.dataset.state = "queued";
    this.state.textContent = "next";
  }

  /** That nothing has come yet, for so many seconds. */
  waits(seconds) {
    this.root.dataset.state = "waiting";
    let said = `waiting for the first token · ${seconds.toFixed(1)} s`;
    if (seconds > 8) said += " · other requests may be ahead, or the server is still compiling";
    this.state.textContent = said;
  }

  /** The recording as far as it has come. */
  grows(seconds) {
    this.root.dataset.state = "streaming";
    this.state.textContent = `${seconds.toFixed(1)} s`;
    this.#upTo(this.recording.steps.length, seconds * 1000);
  }

  /** The recording as it was after so many milliseconds, from its first token on. */
  at(milliseconds) {
    const {steps} = this.recording, ended = milliseconds >= lasted(this.recording);
    let shown = this.root.dataset.state === "racing" ? this.shown : 0;
    while (shown < steps.length && steps[shown][0] <= milliseconds) shown += 1;
    if (shown < this.shown) this.#clear();
    this.root.dataset.state = ended ? "ended" : "racing";
    const passed = Math.min(milliseconds, lasted(this.recording));
    this.state.textContent = `${ended ? "finished in " : ""}${(passed / 1000).toFixed(2)} s`;
    this.#upTo(ended ? steps.length : shown, ended ? null : passed);
  }

  /** All of it. */
  whole() {
    const {recording} = this;
    this.at(Infinity);
    this.root.dataset.state = "done";
    this.state.textContent = recording.ended ? `finished in ${(lasted(recording) / 1000).toFixed(2)} s` : "stopped";
    this.text.scrollTop = 0;
    const lengths = recording.steps.slice(1).map(step => step[1]).join(", ");
    for (const graph of [this.strip, this.histogram]) {
      graph.setAttribute("role", "img");
      graph.setAttribute("aria-label", `Acceptance lengths: ${lengths}`);
    }
    this.note.textContent = recording.finish === "length" ? "Ended by the limit on tokens." : "";
  }

  show(view) {
    this.view = view;
    const shown = this.shown;
    this.#clear();
    this.#upTo(shown, null, true);
  }

  /** Marks where the text begins to differ from another. */
  differsFrom(other) {
    const at = differs(textOf(other), textOf(this.recording));
    if (at < 0) return;
    let left = at;
    this.apart = this.recording.steps.findIndex(step => (left -= [...step[2]].length) < 0);
    this.spans.find(span => Number(span.dataset.step) === this.apart)?.classList.add("differs");
  }

  #titled() {
    const {recording, about} = this, begun = recording.steps.length > 1;
    let title = about.block_size === "auto" ? "Speculation: auto" : "With speculation";
    if (recording.baseline) title = "Baseline without speculation";
    else if (!about.speculation) title = "Answer";
    else if (speculated(recording)) title = "With speculation";
    else if (begun && about.block_size === "auto") title = "No speculation, by choice of auto";
    else if (begun) title = "No speculation";
    this.title.textContent = title;
    this.ran.textContent = about.speculation ? ran(recording, about.block_size === "auto") : "this server has no drafter";
  }

  #clear() {
    this.shown = 0;
    this.spans = [];
    this.painted = -PAINT;
    this.text.textContent = this.strip.textContent = this.note.textContent = "";
  }

  /** Shows the first so many entries; `milliseconds` have passed since the first, or null once that was all. */
  #upTo(count, milliseconds, quietly = false) {
    const {recording} = this, {steps} = recording, before = this.shown;
    this.#titled();
    this.root.classList.toggle("speculated", speculated(recording));
    this.graphs.hidden = !speculated(recording) || recording.baseline;
    this.text.classList.toggle("markdown", this.view === "markdown");
    for (let i = before; i < count; i++) {
      if (this.view === "tokens") this.#token(i, steps[i]);
      if (i && !this.graphs.hidden) this.#bar(i, steps[i]);
    }
    this.shown = count;
    if (this.view === "markdown" && (milliseconds === null || performance.now() - this.painted > PAINT)) {
      this.painted = performance.now();
      this.text.replaceChildren(markdown(steps.slice(0, count).map(step => step[2]).join("")));
    }
    if (count > before && milliseconds !== null) this.text.scrollTop = this.text.scrollHeight;
    if (!this.graphs.hidden) {
      this.#count(count);
      if (count > before) this.strip.scrollLeft = this.strip.scrollWidth;
    }
    if (quietly) return;
    const {tokens, steps: taken, rate, tau} = figures(recording, count, milliseconds);
    const say = (name, value) => { this.values[name].textContent = value; };
    say("rate", rate ? rounded(rate) : "–");
    say("tau", tau ? tau.toFixed(2) : "–");
    const {ttft} = recording, [first, unit] = ttft < 1000 ? [Math.round(ttft), " ms"] : [(ttft / 1000).toFixed(1), " s"];
    this.values.ttft.replaceChildren(...ttft === null ? ["–"] : [String(first), element("small", {textContent: unit})]);
    say("tokens", String(tokens));
    this.labels.tokens.textContent = `token${tokens === 1 ? "" : "s"} in ${taken} step${taken === 1 ? "" : "s"}`;
  }

  #tone(i) {
    for (let k = this.several.length; k <= i; k++)
      this.several.push(k ? this.several[k - 1] + (this.recording.steps[k][1] > 1) : 0);
    return this.several[i] % 2 ? "odd" : "even";
  }

  #said(i) {
    if (!i) return "The first token comes from reading the prompt, not from a step.";
    const step = this.recording.steps[i], draft = proposed(this.recording, step);
    if (!draft) return `Step ${i}: 1 token, nothing proposed.`;
    const right = step[1] - 1;
    return `Step ${i}: ${step[1]} token${right ? "s" : ""}; ${right} of ${draft} draft tokens accepted, and one from the target.`;
  }

  #token(i, [, count, piece]) {
    if (!piece) return;
    const span = element("span", {textContent: piece, title: this.#said(i)});
    span.dataset.step = i;
    if (count > 1 && i) span.className = this.#tone(i);
    if (i === this.apart) span.classList.add("differs");
    this.spans.push(span);
    this.text.append(span);
  }

  #bar(i, step) {
    const most = 1 + Math.max(...this.recording.drafts.map(draft => draft.tree ? draft.block_size : draft.proposed), 1);
    const bar = element("i", {title: this.#said(i)}), fill = element("b");
    bar.dataset.step = fill.dataset.step = i;
    if (step[1] > 1) bar.className = this.#tone(i);
    bar.style.height = `${100 * Math.min(1, (1 + proposed(this.recording, step)) / most)}%`;
    fill.style.height = `${100 * Math.min(1, step[1] / Math.min(most, 1 + proposed(this.recording, step)))}%`;
    bar.append(fill);
    this.strip.append(bar);
  }

  #count(count) {
    const counts = [];
    for (const step of this.recording.steps.slice(1, count)) counts[step[1]] = (counts[step[1]] || 0) + 1;
    const most = Math.max(1, ...counts.filter(Boolean)), few = counts.length <= MOST_LABELS + 1;
    this.histogram.replaceChildren();
    for (let length = 1; length < counts.length; length++) {
      const fill = element("b"), found = counts[length] || 0;
      fill.style.height = `${100 * found / most}%`;
      this.histogram.append(element("div", {title: `${found} of ${count - 1} steps gave ${length} token${length === 1 ? "" : "s"}`},
        element("em", {textContent: few && found || ""}), element("span", {}, fill),
        element("small", {textContent: few || length === 1 || length % 4 === 0 ? length : ""})));
    }
  }

  #tell(i) {
    this.note.textContent = this.#said(i);
    for (const part of this.root.querySelectorAll(".told")) part.classList.remove("told");
    for (const part of this.root.querySelectorAll(`span[data-step="${i}"], i[data-step="${i}"]`)) part.classList.add("told");
  }

  async #copy() {
    const text = textOf(this.recording);
    try {
      await navigator.clipboard.writeText(text);
    } catch {  // a page that came over plain HTTP from another machine may not
      const held = element("textarea", {value: text});
      this.root.append(held);
      held.select();
      document.execCommand("copy");
      held.remove();
    }
    this.copied.textContent = "Copied";
    setTimeout(() => { this.copied.textContent = "Copy"; }, 1500);
  }
}

/** Two or more panels that show their recordings at the pace at which they came. */
export class Race {
  constructor(panels, speed, ended) {
    const last = Math.max(...panels.map(panel => lasted(panel.recording))), begin = performance.now();
    for (const {text} of panels) text.style.minHeight = `${text.offsetHeight}px`;  // so that the page stays where it is
    const end = () => {
      for (const panel of panels) {
        panel.whole();
        panel.text.style.minHeight = "";
      }
      ended();
    };
    const frame = () => {
      const passed = (performance.now() - begin) * speed;
      if (passed >= last) return end();
      panels.forEach(panel => panel.at(passed));
      this.next = requestAnimationFrame(frame);
    };
    panels.forEach(panel => panel.at(0));
    this.skip = () => { cancelAnimationFrame(this.next); end(); };
    this.next = requestAnimationFrame(frame);
  }
}

/** The first of these speeds at which a replay takes two seconds. */
export const visible = (panels, speeds) =>
  speeds.find(speed => Math.max(...panels.map(panel => lasted(panel.recording))) / speed >= 2000) || speeds.at(-1);
