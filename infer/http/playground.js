// The page: what is asked, the conversations of this session, and their answers side by side.
import {compared, figures, Recording, refused, rounded} from "./playground_recording.js";
import {element, Panel, Race, visible} from "./playground_panel.js";

const find = id => document.getElementById(id);
const SAMPLE = "Anna has 24 apples. Anna buys 18 more and then gives 15 to Ben. How many apples does Anna have now?";
const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "seed"];
const INPUTS = [...NUMBERS, "system", "schema", "speculation", "compare", "prompt"];
// Fields of a request, and where on the page they are asked.
const ASKED_AT = {messages: "prompt", max_completion_tokens: "max_tokens", response_format: "schema", json_schema: "schema"};
const SPEEDS = [[1, "recorded pace"], [0.5, "1/2 speed"], [0.2, "1/5 speed"], [0.1, "1/10 speed"]];
const STORED = 4e6;  // characters of a session

const store = {
  read(name) { try { return JSON.parse(sessionStorage.getItem(name)); } catch { return null; } },
  write(name, value) { try { sessionStorage.setItem(name, JSON.stringify(value)); return true; } catch { return false; } },
};

let key = sessionStorage.getItem("key") || "", model = null, about = null;
let running = null, race = null;  // what is asked right now, and what is replayed
let conversations = (store.read("conversations") || []).map(revived), current = null;

const headers = () => ({"Content-Type": "application/json", ...(key ? {Authorization: `Bearer ${key}`} : {})});
const view = () => document.querySelector("[name=view]:checked").value;
const comparing = () => ({auto: about.block_size === "auto", dtype: about.dtype});
const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

function revived(conversation) {
  for (const turn of conversation.turns)
    turn.recordings = turn.recordings.map(held => Object.assign(new Recording(held.most), held));
  return conversation;
}

async function connect() {
  find("error").textContent = "";
  try {
    const reply = await fetch("v1/models", {headers: headers()});
    if (reply.status === 401) {
      if (key) find("error").textContent = "The server did not take this key.";
      find("login").hidden = false;
      find("page").hidden = true;
      find("about").textContent = "";
      find("key").focus();
      return;
    }
    if (!reply.ok) throw await refused(reply);
    model = (await reply.json()).data[0];
  } catch (error) {
    find("error").textContent = `The server does not answer: ${error.message}`;
    return;
  }
  about = model.dflash;
  describe();
  offer();
  find("compared").hidden = find("speculates").hidden = !about.switchable;
  find("formed").hidden = !about.constraints;
  find("instructed").hidden = find("fresh").hidden = !about.chat;
  find("max_tokens").max = about.max_length;
  find("login").hidden = true;
  find("page").hidden = false;
  draw();
  find("prompt").focus({preventScroll: true});
}

function describe() {
  const parts = (model.root || "").split("/").filter(Boolean);
  const name = parts.length > 2 && parts.at(-1) === model.id ? parts.slice(-2).join("/") : model.id;
  const size = about.block_size === "auto" ? "speculation: auto" : `block size ${about.block_size}`;
  const drafter = about.speculation ? [`${about.drafter} drafter`, size] : ["no drafter"];
  const facts = [name, ...drafter, about.dtype, about.chat ? "chat" : "text completion", `${about.max_length} tokens of context`];
  find("about").replaceChildren(...facts.map(fact => element("span", {textContent: fact})));
}

/** The block sizes that a request may be limited to. */
function offer() {
  const select = find("speculation"), chosen = select.options.length ? select.value : before.speculation;
  const sizes = about.block_sizes.slice(0, -1).map(String), usual = about.block_size === "auto" ? "automatic" : `block size ${about.block_size}`;
  const options = [["", usual], ...sizes.map(size => [size, size === "1" ? "off (block size 1)" : `block size up to ${size}`])];
  select.replaceChildren(...options.map(([value, textContent]) => element("option", {value, textContent})));
  if (sizes.includes(chosen)) select.value = chosen;
  find("compare").disabled = most() === 1;
}

/** The largest block size that is asked for; null leaves it to the server. */
const most = () => about?.switchable ? Number(find("speculation").value) || null : null;

// What is asked.

function wrong(id, message) {
  const field = find(id);
  let said = find(`${id}-wrong`);
  if (!said) {
    said = element("p", {id: `${id}-wrong`, className: "wrong"});
    said.setAttribute("role", "alert");
    field.after(said);
    field.setAttribute("aria-describedby", said.id);
  }
  said.textContent = message;
  if (message) field.setAttribute("aria-invalid", "true"); else field.removeAttribute("aria-invalid");
}

function complain(id, message) {
  wrong(id, message);
  if (find(id).closest("details")) find("settings").open = true;
  find(id).focus();
  return false;
}

/** Whether all fields can be sent; says at the first that cannot why not. */
function valid() {
  INPUTS.filter(id => id !== "compare").forEach(id => find(`${id}-wrong`) && wrong(id, ""));
  if (!find("prompt").value.trim()) return complain("prompt", "Write a prompt first.");
  for (const id of NUMBERS) {
    const {validity, value, min, max, step} = find(id);
    const range = max ? `between ${min} and ${max}` : `${min} or more`;
    const whole = step === "1" ? "a whole number " : "a number ";
    if (validity.badInput || validity.rangeUnderflow || validity.rangeOverflow || (step === "1" && validity.stepMismatch))
      return complain(id, `Give ${whole}${range}.`);
    if (!value.trim()) return complain(id, `Give ${whole}${range}.`);
  }
  const schema = about.constraints && find("schema").value.trim();
  if (schema) try { JSON.parse(schema); } catch (error) { return complain("schema", `This is not valid JSON: ${error.message}`); }
  return true;
}

function body(before, prompt, most) {
  const asked = {model: model.id, stream: true, stream_options: {include_steps: true}};
  const system = find("system").value.trim(), schema = about.constraints && find("schema").value.trim();
  if (about.chat) {
    const said = before.flatMap(turn => [["user", turn.prompt], ["assistant", turn.recordings[0].content]]);
    const all = [...(system ? [["system", system]] : []), ...said, ["user", prompt]];
    asked.messages = all.map(([role, content]) => ({role, content}));
  } else asked.prompt = prompt;
  for (const name of NUMBERS) asked[name] = Number(find(name).value);
  if (schema) asked.response_format = {type: "json_schema", json_schema: {name: "answer", schema: JSON.parse(schema)}};
  if (most) asked.speculation = most > 1 && {max_block_size: most};
  return asked;
}

/** Says what went wrong, at the field that it is about if that is known. */
function failed(error) {
  const named = error.param || (/^(\w+)\b/.exec(error.message) || [])[1];
  let id = ASKED_AT[named] || named;
  if (["prompt_too_long", "empty_prompt"].includes(error.code)) id = "prompt";
  if (error.status === 400 && INPUTS.includes(id)) complain(id, error.message);
  else find("error").textContent = error.message;
}

// Conversations and their turns.

function draw() {
  const turns = current ? current.turns : [];
  race?.skip();
  find("thread").replaceChildren(...turns.map((turn, i) => shown(turn, i === turns.length - 1).root));
  find("bar").hidden = !turns.length;
  find("intro").hidden = turns.length > 0 || !about.switchable;
  find("asks").textContent = turns.length && about.chat ? "Follow-up" : "Prompt";
  list();
}

/** A turn on the page: its question, its answers, and how they compare. */
function shown(turn, last) {
  const panels = turn.recordings.map(recording => new Panel(recording, about, view()));
  const pair = element("div", {className: `pair of-${panels.length}`}, ...panels.map(panel => panel.root));
  const large = element("strong"), said = element("span"), again = element("button", {type: "button", textContent: "Run again"});
  const replay = element("button", {type: "button", textContent: "Replay"}), speed = element("select", {ariaLabel: "Speed of the replay"});
  const verdict = element("p", {className: "verdict", hidden: true}, large, said);
  verdict.setAttribute("role", "status");
  speed.append(...SPEEDS.map(([value, name]) => element("option", {value, textContent: name})));
  const tools = element("div", {className: "row tools", hidden: true}, replay, speed, again);
  const root = element("article", {className: "turn"}, element("p", {className: "asked", textContent: turn.prompt}), verdict, pair, tools);
  root.panels = panels;
  root.says = (...words) => {
    verdict.hidden = panels.length < 2;
    [large.textContent, said.textContent] = words;
  };
  again.addEventListener("click", () => repeat(turn));
  replay.addEventListener("click", () => race ? race.skip() : play(Number(speed.value)));
  again.hidden = !last;

  function play(pace) {
    race?.skip();
    speed.value = pace;
    replay.textContent = "Skip to the end";
    tools.hidden = verdict.hidden = false;
    large.textContent = "Replay";
    said.textContent = `Both answers from their first token on, ${pace === 1 ? "at the recorded pace" : `in slow motion: ${speed.selectedOptions[0].textContent}`}.`;
    root.dataset.state = "racing";
    race = new Race(panels, pace, finish);
  }

  function finish() {
    race = null;
    replay.textContent = "Replay";
    root.dataset.state = "done";
    tools.hidden = verdict.hidden = false;
    if (panels.length < 2) {
      verdict.hidden = true;
      return;
    }
    const [first, second] = turn.recordings;
    if (!first.ended || !second.ended) return root.says("", "Stopped.");
    const found = compared(first, second, comparing());
    root.says(found.large, found.said);
    panels[1].differsFrom(first);
  }

  if (turn.recordings.every(recording => recording.settled)) { panels.forEach(panel => panel.whole()); finish(); }
  return {root, panels, pair, tools, play, finish};
}

async function run() {
  if (running || !valid()) return;
  race?.skip();
  find("error").textContent = "";
  const prompt = find("prompt").value, speculative = about.speculation && most() !== 1;
  if (!current || !about.chat) {
    current = {turns: []};
    conversations.unshift(current);
  }
  const before = [...current.turns], turn = {prompt, recordings: [new Recording(most())]};
  const both = speculative && about.switchable && find("compare").checked;
  current.turns.push(turn);
  running = new AbortController();
  document.body.dataset.state = "running";
  find("run").disabled = true;
  find("stop").disabled = false;
  if (about.chat) find("prompt").value = "";
  if (both) turn.recordings.push(new Recording(1));
  draw();
  const where = find("thread").lastElementChild, {panels} = where, path = about.chat ? "v1/chat/completions" : "v1/completions";
  where.scrollIntoView({block: "start", behavior: calm() ? "auto" : "smooth"});
  if (both) {
    where.dataset.state = "recording";
    panels[1].queued();
  }
  let stopped = false;
  try {
    for (const [i, panel] of panels.entries()) {
      where.says(`Recording ${i + 1} of 2`, "The same request runs first with speculation, then without; then both answers are replayed side by side.");
      await followed(panel, signal => turn.recordings[i].record(path, body(before, prompt, turn.recordings[i].most), headers(), signal, () => panel.came()));
    }
  } catch (error) {
    stopped = true;
    if (error.status === 401) connect();
    else if (error.name === "AbortError") find("error").textContent = "";
    else failed(error);
  }
  turn.recordings = turn.recordings.filter(recording => recording.steps.length);
  turn.recordings.forEach(recording => { recording.settled = true; });
  if (!turn.recordings.length) {  // nothing came
    current.turns.pop();
    if (!current.turns.length) forget(current);
    find("prompt").value = prompt;
  }
  running = null;
  delete document.body.dataset.state;
  find("run").disabled = false;
  find("stop").disabled = true;
  keep();
  draw();
  if (turn.recordings.length > 1 && !stopped && !calm()) replayed(turn);
}

/** Shows how long a panel has waited while something is recorded for it. */
async function followed(panel, recorded) {
  const begin = performance.now(), seconds = () => (performance.now() - begin) / 1000;
  let first = null;
  panel.waits(0);
  panel.came = () => {
    if (!panel.recording.steps.length) return;
    first ??= seconds();
    panel.grows(Math.max(0.001, seconds() - first));
  };
  const timer = setInterval(() => first === null && panel.waits(seconds()), 100);
  try { await recorded(running.signal); } finally { clearInterval(timer); }
}

/** The race of a turn, at a speed at which it can be seen. */
function replayed(turn) {
  const at = current.turns.indexOf(turn), made = shown(turn, true);
  find("thread").children[at].replaceWith(made.root);
  made.root.scrollIntoView({block: "nearest"});
  made.play(visible(made.panels, SPEEDS.map(([speed]) => speed)));
}

function repeat(turn) {
  if (running) return;
  if (about.chat) current.turns.splice(current.turns.indexOf(turn));
  find("prompt").value = turn.prompt;
  run();
}

function fresh() {
  if (running) return;
  const first = current?.turns[0]?.prompt;
  current = null;
  if (first && !find("prompt").value) find("prompt").value = first;
  draw();
  find("prompt").focus();
}

function forget(conversation) {
  conversations = conversations.filter(one => one !== conversation);
  current = null;
}

/** Keeps the session for a reload; the oldest conversations go where there is no room. */
function keep() {
  let kept = conversations.filter(one => one.turns.length);
  while (kept.length && (JSON.stringify(kept).length > STORED || !store.write("conversations", kept))) kept = kept.slice(0, -1);
  remember();
}

function remember() {
  const values = Object.fromEntries(INPUTS.map(id => [id, id === "compare" ? find(id).checked : find(id).value]));
  store.write("inputs", {...values, view: view(), current: conversations.indexOf(current)});
}

function list() {
  find("history").replaceChildren(...conversations.filter(one => one.turns.length).map(one => {
    const [first, second] = one.turns.at(-1).recordings, {tau, rate} = first ? figures(first) : {};
    const facts = [one.turns.length > 1 ? `${one.turns.length} turns` : "", tau ? `τ ${tau.toFixed(2)}` : "", rate ? `${rounded(rate)} tokens/s` : ""];
    const rates = [first, second].map(one => one?.report?.tokens_per_second);
    if (rates.every(Boolean)) facts.push(compared(first, second, comparing()).large.replace(" with speculation", ""));
    const button = element("button", {type: "button"}, element("span", {textContent: one.turns[0].prompt}),
      element("small", {textContent: facts.filter(Boolean).join(" · ")}));
    if (one === current) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => {
      if (running) return;
      current = one;
      draw();
      remember();
    });
    return element("li", {}, button);
  }));
  find("set").textContent = settings();
}

function settings() {
  const said = [`temperature ${find("temperature").value}`, `at most ${find("max_tokens").value} tokens`, `seed ${find("seed").value}`];
  if (find("system").value.trim()) said.push("system prompt");
  if (find("schema").value.trim()) said.push("JSON schema");
  if (most()) said.push(most() === 1 ? "speculation off" : `block size up to ${most()}`);
  return said.join(", ");
}

find("form").addEventListener("submit", event => { event.preventDefault(); run(); });
find("form").addEventListener("input", event => {
  if (find(`${event.target.id}-wrong`)) wrong(event.target.id, "");
  find("compare").disabled = most() === 1;
  find("set").textContent = settings();
  remember();
});
find("view").addEventListener("change", () => {
  for (const turn of find("thread").children) turn.panels.forEach(panel => panel.show(view()));
  find("legend").hidden = view() !== "tokens";
  remember();
});
find("stop").addEventListener("click", () => running?.abort());
find("fresh").addEventListener("click", fresh);
find("login").addEventListener("submit", event => {
  event.preventDefault();
  key = find("key").value.trim();
  sessionStorage.setItem("key", key);
  connect();
});
document.addEventListener("keydown", event => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && about) { event.preventDefault(); run(); }
  if (event.key === "Escape") { running?.abort(); race?.skip(); }
});

const before = store.read("inputs") || {prompt: SAMPLE};
for (const id of INPUTS) if (id in before) find(id)[id === "compare" ? "checked" : "value"] = before[id];
if (before.view === "markdown") document.querySelector("[name=view][value=markdown]").checked = true;
find("legend").hidden = view() !== "tokens";
current = conversations[before.current] || null;
connect();
