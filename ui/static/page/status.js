/* The status line. Contract: says how a race waits, runs and ended; while costs are measured a bar shows how far that
   is. Place and time of a wait are Gradio's own (its line "queue: place/length | s/s" is read, and hidden once it was
   understood). While a run sends nothing, asks whether the server still answers, and says when it does not; Gradio
   reloads the page when the server is back. After a reload that ended a race, says that it did, and fills in what that
   race was asked for: this tab's session storage holds that from the click on Run to the race's end. */
(() => {
  "use strict";
  const { on, tell, setText, percent, busy, player } = window.Bass;
  const PHASES = { waiting: "Waiting for the device…", stopped: "Stopped." };
  // The phase, and the line, which is mounted once.
  let now = "ready", line = null;

  function show(phase, message) {
    // Only a race that was asked for and has not ended has news: what a stopped one still sends is none.
    if (phase !== "waiting" && !busy(now)) return;
    setText(line, message || PHASES[phase] || "");
    if (phase === "stopped" || phase === "waiting") player.clear();
    // The end of a run is announced after the values that still wait to be shown.
    if (phase === "done" || phase === "error") player.push("phase", phase);
    else tell("phase", phase === "lost" ? "error" : phase);
  }

  const KEY = "bass-race";
  const WORDS = {
    reload: "Reloading ended your race: press Run to start it again.",
    lost: "The connection to the server was lost, which ended your race: press Run to start it again.",
  };
  let why = "reload";

  /** What the storage holds: {values, why}, or null; a browser may forbid it. */
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
      // Without storage the page forgets.
    }
  }

  // A copied tab copies the storage too: only a page that was loaded again ended a race.
  const again = performance.getEntriesByType("navigation")[0]?.type !== "navigate";
  const ended = again ? stored() : null, told = WORDS[ended?.why] ?? WORDS.reload;
  store(null);
  let asked = [];
  // Until a stopped race's event has ended, Gradio drops clicks on Run: open says so, wanted that there was one.
  let open = false, wanted = false;

  /** Passes on the form's values, which Run sends. */
  function asking(...values) {
    asked = values;
    [open, wanted] = [true, false];
    if (!busy(now)) show("waiting");
    store({ values, why: "reload" });
    return values;
  }

  /** The form's values: those of the race that a reload ended, if there was one and the form is still the same. */
  const askedBefore = (now) => (ended && ended.values.length === now.length ? ended.values : now);

  // While the page goes away, its race fails; that is no end of it.
  let leaving = false;
  window.addEventListener("pagehide", () => (leaving = true));
  window.addEventListener("pageshow", () => (leaving = false));
  window.addEventListener("beforeunload", () => {
    leaving = true;
    setTimeout(() => (leaving = false), 5000);
  });

  // Ask after QUIET_MS without news; give up after PATIENCE_MS: a busy server answers between two steps.
  const QUIET_MS = 2000, PATIENCE_MS = 20_000;
  const SENTENCE = "The connection to the server was lost. What was shown before stays here until the page is reloaded.";
  let timer = null;

  /** Whether the server answers; a proxy in front of a lost server answers with 502 to 504. */
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
      show("lost", SENTENCE);
    }
  }

  /** Ask once nothing has come for QUIET_MS; each new line restarts the wait. */
  function wait() {
    clearTimeout(timer);
    timer = busy(now) ? setTimeout(ask, QUIET_MS) : null;
  }

  on("line", wait);

  const LINE = /queue:\s*(\d+)\s*\/\s*(\d+)(?:\s*\|\s*([\d.]+)\s*\/\s*([\d.]+)\s*s)?/;

  /** "about 40 s"; of less than 10 s every second counts. */
  function about(seconds) {
    const rounded = seconds < 10 ? Math.ceil(seconds) : Math.ceil(seconds / 5) * 5;
    return rounded < 120 ? `about ${rounded} s` : `about ${Math.round(rounded / 60)} min`;
  }

  /** What Gradio's line means; "" if it says nothing of a queue. Its time runs to the end of one's own race. */
  function inQueue(text) {
    const [found, place, length, spent, all] = LINE.exec(text) ?? [];
    if (!found) return "";
    const left = Number(all) - Number(spent);
    const when = Number.isFinite(left) && left >= 1 ? ` Going by earlier races, yours ends in ${about(left)}.` : "";
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

  /** Shows how far the measurements are. */
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
      if (phase !== "running") store(why === "lost" ? { values: asked, why } : null);
      why = "reload";
    }
    if (!line) return;
    line.dataset.phase = phase;
    // That a reload ended a race is said until the next one, whatever plays meanwhile.
    if (phase === "playing" && !(ended && line.textContent === told)) setText(line, "");
  });

  window.Bass.mountStatus = (element, props, watch) => {
    line = element.querySelector(".message");
    line.dataset.phase = now;
    if (ended) line.textContent = told;
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
      // Without models, Run plays a recording.
      if (!run || run.disabled || busy(now) || document.querySelector("[data-replay]")) return;
      wanted = open;
      if (!open) show("waiting");
    });
    mountPlace(element.closest("#status-line"), element.querySelector(".place"));
    mountMeasuring(element.querySelector(".measuring"));
  };
  Object.assign(window.Bass, { asking, askedBefore, ended: Boolean(ended) });
})();
