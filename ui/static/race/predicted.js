/* Marks predicted figures. In a race on a predicted clock (the head's clock), every element with data-predicted gets a
   mark with text: "badge" is a button that opens the assumptions, "word" the word "predicted", and "here" marks a figure
   that was measured on this machine. Elements with data-predicted-text show that text instead of their own. In a measured
   race, none of these marks is in the document. clock() is null for measured times. */
import { on, make, setText, number, percent } from "bass/page/page.js";
import { run } from "bass/race/run.js";

const CARD = "predicted-card";
// Names of the assumptions, and how to show their values. Others are shown under their own names.
const ASSUMED = {
  bandwidth: ["share of the memory bandwidth that a step reaches", percent],
  compute: ["share of the FLOP/s that a step reaches", percent],
  link: ["share of the bandwidth between GPUs that a step reaches", percent],
  step_us: ["overhead of a step besides its layers", (v) => number(v, 0, " µs")],
  layer_us: ["overhead of a layer in a step of one token, besides reading and multiplying", (v) => number(v, 1, " µs")],
  wide_layer_us: ["overhead of a layer in a step of several tokens", (v) => number(v, 1, " µs")],
  kernel_us: ["additional overhead of each of up to six kernels, in layers with large weights", (v) => number(v, 1, " µs")],
  eager_layer_us: ["time of a layer without CUDA graphs, as on ZeroGPU", (v) => number(v, 0, " µs")],
  allreduce_us: ["overhead of an all-reduce, besides moving its bytes", (v) => number(v, 1, " µs")],
  host_us: ["wait for the host in each round", (v) => number(v, 0, " µs")],
  host_row_us: ["additional wait for each row", (v) => number(v, 0, " µs")],
  drafting_us: ["additional wait in a round that drafts", (v) => number(v, 0, " µs")],
  drafting_row_us: ["additional wait for each row of such a round", (v) => number(v, 0, " µs")],
};

export const clock = () => run()?.head.clock ?? null;

/** "lane time", or "predicted lane time" in a predicted race. */
export const laneTime = () => (clock() ? "predicted lane time" : "lane time");

/** The text, plus ", predicted" in a predicted race. */
export const wear = (text) => (clock() ? `${text}, predicted` : text);

function markOf(kind) {
  if (kind === "word") return make("span", "predicted", " predicted");
  if (kind === "here") return make("span", "predicted-here", " this machine");
  const button = make("button", "predicted predicted-badge", "predicted");
  button.type = "button";
  button.setAttribute("popovertarget", CARD);
  button.title = "Show the assumptions";
  return button;
}

/** Add all marks if the race is predicted, else remove them. */
function mark() {
  const on = Boolean(clock());
  document.body.classList.toggle("predicts", on);
  for (const element of document.querySelectorAll("[data-predicted]")) {
    const present = element.querySelector(":scope > :is(.predicted, .predicted-here)");
    if (on && !present) element.append(markOf(element.dataset.predicted));
    else if (!on) present?.remove();
  }
  for (const element of document.querySelectorAll("[data-predicted-text]")) {
    element.dataset.measuredText ??= element.textContent;
    setText(element, on ? element.dataset.predictedText : element.dataset.measuredText);
  }
  for (const drawn of document.querySelectorAll("figure:has([data-predicted=badge]) .plot")) {
    drawn.setAttribute("aria-label", wear(drawn.getAttribute("aria-label").replace(/, predicted$/, "")));
  }
  const about = document.querySelector(".about-clock");
  if (about) setText(about, on ? `Lane times: predicted for ${run().head.machine}` : "");
}

function pairs(list, rows) {
  list.replaceChildren(...rows.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
}

/** The card with the assumptions, created on first use. */
function cardElement() {
  const existing = document.getElementById(CARD);
  if (existing) return existing;
  const card = make("div", "predicted-card");
  card.id = CARD;
  card.popover = "auto";
  card.setAttribute("role", "dialog");
  card.setAttribute("aria-label", "Predictions and assumptions");
  const close = make("button", "action", "Close");
  close.type = "button";
  Object.assign(close, { popoverTargetElement: card, popoverTargetAction: "hide" });
  card.append(make("h2", "", "Predicted, not measured"), make("p", "predicted-times"), make("p", "predicted-texts"),
    make("h3", "", "Assumed"), make("dl"), make("p", "predicted-source"), close);
  // Inside Gradio's container, so that it gets the same styles. The browser's top layer shows it above everything.
  (document.querySelector(".bass-lanes") ?? document.body).append(card);
  return card;
}

function describe() {
  const now = clock();
  if (!now) return document.getElementById(CARD)?.remove();
  const card = cardElement(), { machine, settings } = run().head, coin = settings.acceptance;
  const say = (part, text) => setText(card.querySelector(part), text);
  say(".predicted-times", `All times, and all figures computed from times, are predicted for ${machine}: the time it would need for exactly ` +
    "the forwards of this run, with the same tokens, rows and cached lengths. A forward takes as long as reading its bytes or multiplying, whichever is longer.");
  say(".predicted-texts", `${Number.isFinite(coin)
    ? `Each draft is accepted at random with a chance of ${coin}: the acceptance is a setting, and the texts mean nothing.`
    : "Texts, drafts and acceptances come from this run, of the small models on this machine."} Device and memory readings are from this machine.`);
  const assumed = Object.entries(now.assumptions ?? {}).map(([name, value]) => {
    const [words, show] = ASSUMED[name] ?? [name.replaceAll("_", " "), (v) => `${v}`];
    return [words, Number.isFinite(value) ? show(value) : `${value}`];
  });
  pairs(card.querySelector("dl"), [["GPUs", `${now.gpus ?? 1}`], ["target", `${now.target ?? "n/a"}`],
    ["draft", `${now.draft ?? "n/a"}`], ...assumed]);
  say(".predicted-source", now.source ? `Source: ${now.source}` : "");
}

on("start", () => queueMicrotask(() => {
  // In a microtask, after all other listeners, because some of them create lanes.
  mark();
  describe();
}));

