// The page: reads the form, runs the request with drafts and then without, and shows what happens.

import { byId, html } from "./elements.js";
import { comparisonOf, newRun, summaryOf, take } from "./run.js";
import { RunView } from "./runview.js";
import { eventsOf, newTrace, Refusal } from "./stream.js";
import { drawTree } from "./tree.js";

const QUICK_TREE = 250;
const CALM_TREE = 1000;
const MAX_RANDOM_SEED = 2 ** 31;
const calm = matchMedia("(prefers-reduced-motion: reduce)");
const form = byId("ask");
const stepInput = byId("step-number");

let views = [];
let running = null;
/** Index of the step that was chosen by hand; null follows the newest. */
let chosen = null;
let treeDrawnAt = -Infinity; // times count from the load of the page, so 0 may be a moment ago
let frame = 0;

form.addEventListener("submit", (submitted) => {
  submitted.preventDefault();
  if (!running) {
    runAll(requestOf());
  }
});
form.addEventListener("keydown", (key) => {
  if (key.key === "Enter" && (key.ctrlKey || key.metaKey)) {
    form.requestSubmit();
  }
});
form.addEventListener("change", showKind);
byId("stop").addEventListener("click", () => running?.abort());
stepInput.addEventListener("input", () => look(stepInput.valueAsNumber - 1));
byId("runs").addEventListener("click", (click) => {
  const token = click.target.closest(".run:first-of-type .token");
  if (token) {
    look(Number(token.dataset.step));
  }
});
showKind();

/** What the form asks for. A seed is always named, so that the second run has the same. */
function requestOf() {
  const prompt = byId("prompt").value;
  const system = byId("system").value;
  const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: prompt }];
  return {
    ...(isChat() ? { messages } : { prompt }),
    temperature: byId("temperature").valueAsNumber,
    max_tokens: byId("max-tokens").valueAsNumber,
    seed: byId("seed").value ? byId("seed").valueAsNumber : Math.floor(Math.random() * MAX_RANDOM_SEED),
  };
}

/** One run after the other, so that they do not share the processors. */
async function runAll(request) {
  begin();
  const compare = byId("compare").checked;
  try {
    const drafted = await run("With drafts", { ...request, speculation: { mode: "auto" } }, request.seed);
    if (compare) {
      const alone = await run("The target alone", { ...request, speculation: { mode: "off" } }, request.seed);
      byId("comparison").textContent = comparisonOf(drafted, alone);
      byId("comparison").hidden = false;
    }
    say(`Finished. ${drafted.ids.length} tokens. ${byId("comparison").textContent}`);
  } catch (error) {
    tell(error);
  } finally {
    end();
  }
}

function begin() {
  running = new AbortController();
  views = [];
  chosen = null;
  treeDrawnAt = -Infinity;
  byId("error").textContent = "";
  byId("comparison").textContent = "";
  byId("comparison").hidden = true;
  byId("step").hidden = true;
  byId("ids").hidden = true;
  byId("ids").replaceChildren();
  document.querySelectorAll(".run").forEach((old) => old.remove());
  buttons();
  say("Running.");
}

function end() {
  running = null;
  buttons();
  treeDrawnAt = -Infinity;
  showSoon();
}

async function run(title, body, seed) {
  const trace = newTrace();
  const view = new RunView(title, newRun(performance.now()), views[0]);
  views.push(view);
  byId("runs").insertBefore(view.element, byId("comparison"));
  const options = { token: byId("token").value, traceparent: trace.traceparent, signal: running.signal };
  for await (const event of eventsOf(body, options)) {
    take(view.run, event, performance.now());
    if (event.type === "started") {
      showIds(title, event, trace, seed);
    }
    showSoon();
  }
  return view.run;
}

function tell(error) {
  if (error.name === "AbortError") {
    say("Stopped.");
    return;
  }
  byId("error").textContent = error instanceof Refusal ? error.message : "The page has failed; its console says why.";
  if (!(error instanceof Refusal)) {
    console.error(error);
  }
}

function look(step) {
  chosen = running && step === views[0].run.steps.length - 1 ? null : step;
  treeDrawnAt = -Infinity;
  showSoon();
}

function showSoon() {
  frame ||= requestAnimationFrame(show);
}

function show() {
  frame = 0;
  const moving = views.map((view, index) => view.show(index ? null : chosen, calm.matches));
  showStep();
  if (running || moving.includes(true)) {
    showSoon();
  }
}

/** The tree of the step at hand; while they come, not of every one, so that it can be read. */
function showStep() {
  const steps = views[0]?.run.steps ?? [];
  const now = performance.now();
  if (!steps.length || now - treeDrawnAt < (calm.matches ? CALM_TREE : QUICK_TREE)) {
    return;
  }
  treeDrawnAt = now;
  const index = chosen ?? steps.length - 1;
  byId("step").hidden = false;
  stepInput.max = steps.length;
  stepInput.value = index + 1;
  byId("step-summary").textContent = summaryOf(steps[index], steps.length);
  stepInput.setAttribute("aria-valuetext", byId("step-summary").textContent);
  drawTree(byId("tree"), steps[index]);
}

function showIds(title, started, trace, seed) {
  const ids = byId("ids");
  ids.hidden = false;
  const known = [
    [`${title}: request`, started.request_id],
    [`${title}: trace`, trace.traceId],
    ...(ids.childElementCount ? [] : [["Seed of both", String(seed)]]),
  ];
  for (const [name, value] of known) {
    const button = html("button", "", "Copy");
    button.type = "button";
    button.setAttribute("aria-label", `Copy ${name.toLowerCase()}`);
    const code = html("code", "", value);
    button.addEventListener("click", () => copy(code, button));
    const entry = document.createElement("dd");
    entry.append(code, button);
    ids.append(html("dt", "", name), entry);
  }
}

/** To the clipboard where the browser lets us; else the text is selected. */
async function copy(code, button) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    getSelection().selectAllChildren(code);
    button.textContent = "Selected";
  }
}

function showKind() {
  document.querySelectorAll(".chat").forEach((part) => (part.hidden = !isChat()));
  byId("prompt-label").textContent = isChat() ? "Message" : "Text to continue";
}

function isChat() {
  return form.elements.kind.value === "chat";
}

function buttons() {
  byId("run").disabled = Boolean(running);
  byId("stop").disabled = !running;
}

function say(sentence) {
  byId("status").textContent = sentence;
}
