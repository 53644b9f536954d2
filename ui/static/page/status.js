/* The status line.
   - It shows how a race waits, runs and ended, and a progress bar while costs are measured.
   - The place in the queue comes from Gradio's line "queue: place/length | s/s", which is hidden once it was parsed.
   - While a run sends nothing, the script checks whether the server still answers, and reports a lost connection. Gradio
     reloads the page when the server is back.
   - If a reload ended a race, the line says so, and the form gets that race's settings again. They are in the tab's
     session storage from the click on Run until the end of the race. */
import { on, tell, setText, percent, busy, player } from "bass/page/page.js";

const PHASES = { waiting: "Waiting for the device…", stopped: "Stopped." };
// The current phase, and the element of the line.
let now = "ready", line = null;

function show(phase, message) {
  // Ignore further messages of a stopped race.
  if (phase !== "waiting" && !busy(now)) return;
  setText(line, message || PHASES[phase] || "");
  if (phase === "stopped" || phase === "waiting") player.clear();
  // Announce the end of a run after the values that still wait to be shown.
  if (phase === "done" || phase === "error") player.push("phase", phase);
  else tell("phase", phase === "lost" ? "error" : phase);
}

const KEY = "bass-race";
const SENTENCES = {
  reload: "Reloading ended your race: press Run to start it again.",
  lost: "The connection to the server was lost, which ended your race: press Run to start it again.",
};
let why = "reload";

/** The stored {values, why}, or null. A browser may forbid storage. */
function stored() {
  try {
    return JSON.parse(sessionStorage.getItem(KEY));
  } catch {
    return null;
  }
}

function store(value) {
  try {
    if (value) sessionStorage.setItem(KEY, JSON.stringify(value));
    else sessionStorage.removeItem(KEY);
  } catch {
    // Without storage, a reload loses the settings.
  }
}

// Duplicating a tab copies its storage too, but only a reload ends a race.
const reloaded = performance.getEntriesByType("navigation")[0]?.type !== "navigate";
export const ended = reloaded ? stored() : null, endSentence = SENTENCES[ended?.why] ?? SENTENCES.reload;
store(null);
let runValues = [];
// Gradio drops clicks on Run until the event of a stopped race has ended. `open` is true until then, and `wanted` says
// whether Run was clicked meanwhile.
let open = false, wanted = false;

/** Returns the form's values, which Run sends, and remembers them. */
export function asking(...values) {
  runValues = values;
  [open, wanted] = [true, false];
  if (!busy(now)) show("waiting");
  store({ values, why: "reload" });
  return values;
}

/** The form's values: those of the race that a reload ended, if there was one and the form has the same fields. */
export const askedBefore = (now) => (ended && ended.values.length === now.length ? ended.values : now);

// Leaving the page also makes a race fail. Keep the race's stored settings in that case, for the page after a reload.
let leaving = false;
window.addEventListener("pagehide", () => (leaving = true));
window.addEventListener("pageshow", () => (leaving = false));
window.addEventListener("beforeunload", () => {
  leaving = true;
  setTimeout(() => (leaving = false), 5000);
});

// Check the server after QUIET_MS without a line. It has PATIENCE_MS to answer, because a busy server answers only
// between steps.
const QUIET_MS = 2000, PATIENCE_MS = 20_000;
const LOST = "The connection to the server was lost. The results so far stay here until the page reloads, which it does as " +
  "soon as the server is back.";
let timer = null;

/** Whether the server answers. A proxy in front of a lost server answers with 502 to 504. */
async function answers() {
  try {
    const options = { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) };
    return (await fetch("gradio_api/app_id", options)).status < 500;
  } catch {
    return false;
  }
}

async function ask() {
  if (await answers()) wait();
  else if (busy(now)) {
    why = "lost";
    show("lost", LOST);
  }
}

/** Check the server once nothing has come for QUIET_MS. Each new line restarts the wait. */
function wait() {
  clearTimeout(timer);
  timer = busy(now) ? setTimeout(ask, QUIET_MS) : null;
}

on("line", wait);

const LINE = /queue:\s*(\d+)\s*\/\s*(\d+)(?:\s*\|\s*([\d.]+)\s*\/\s*([\d.]+)\s*s)?/;

/** A rounded time such as "about 40 s". Below 10 s it is exact to the second. */
function about(seconds) {
  const rounded = seconds < 10 ? Math.ceil(seconds) : Math.ceil(seconds / 5) * 5;
  return rounded < 120 ? `about ${rounded} s` : `about ${Math.round(rounded / 60)} min`;
}

/** Gradio's line in words, or "" if the line is not about a queue. Its time is that until this race ends. */
function inQueue(text) {
  const [match, place, length, spent, all] = LINE.exec(text) ?? [];
  if (!match) return "";
  const left = Number(all) - Number(spent);
  const when = Number.isFinite(left) && left >= 1 ? ` Judging by earlier races, yours ends in ${about(left)}.` : "";
  return `Place ${place} of ${length} in the queue.${when}`;
}

/** Shows the place while a race waits. */
function mountPlace(element, line) {
  let waiting = false;
  const read = () => {
    const own = [...element.querySelectorAll(".progress-text, .meta-text, .meta-text-center")].map((e) => e.textContent).join(" ");
    const words = waiting ? inQueue(own) : "";
    element.classList.toggle("understood", words !== "");
    if (words || !waiting) setText(line, words);
  };
  const watch = new MutationObserver(read);
  on("phase", (phase) => {
    waiting = phase === "waiting";
    watch.disconnect();
    if (waiting) watch.observe(element, { childList: true, subtree: true, characterData: true });
    read();
  });
}

/** Shows the progress of the measurements. */
function mountMeasuring(part) {
  const bar = part.querySelector("progress"), words = part.querySelector("span");
  on("measuring", (measuring) => {
    part.hidden = !measuring;
    if (!measuring) return;
    bar.value = measuring.done;
    const left = measuring.left_ms === null ? "" : measuring.left_ms < 500 ? ", almost done" : `, ${about(measuring.left_ms / 1000)} left`;
    setText(words, `${percent(measuring.done)}${left}`);
  });
  on("phase", (phase) => phase !== "running" && (part.hidden = true));
}

on("phase", (phase) => {
  now = phase;
  wait();
  if (!leaving && phase !== "waiting" && phase !== "ready") {
    if (phase !== "running") store(why === "lost" ? { values: runValues, why } : null);
    why = "reload";
  }
  if (!line) return;
  line.dataset.phase = phase;
  // Keep the sentence about a reload until the next race, even while a recording plays.
  if (phase === "playing" && !(ended && line.textContent === endSentence)) setText(line, "");
});

export const mountStatus = (element, props, watch) => {
  line = element.querySelector(".message");
  line.dataset.phase = now;
  if (ended) line.textContent = endSentence;
  watch("value", () => {
    if (!props.value) return;
    const { phase, message, measuring } = JSON.parse(props.value);
    show(phase, message);
    tell("measuring", measuring ?? null);
    if (["done", "error", "lost"].includes(phase)) open = false;
    if (phase === "lost" && wanted) setTimeout(() => document.querySelector("#run")?.click());
    if (!open) wanted = false;
  });
  document.addEventListener("click", (event) => {
    if (event.target.closest("#stop")) show("stopped");
    const run = event.target.closest("#run");
    // On a page without models, Run plays a recording.
    if (!run || run.disabled || busy(now) || document.querySelector("[data-replay]")) return;
    wanted = open;
    if (!open) show("waiting");
  });
  mountPlace(element.closest("#status-line"), element.querySelector(".place"));
  mountMeasuring(element.querySelector(".measuring"));
};
