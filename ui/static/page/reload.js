/* Says, after a reload that ended a race, that it did, and fills in what that race was asked for. Contract: this tab's
   session storage holds what a race under way was asked for, from the click on Run to its end. */
(() => {
  "use strict";
  const { on } = window.Bass;
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
  const ended = again ? stored() : null;
  store(null);
  let asked = [];

  /** Passes on the form's values, which Run sends. */
  function asking(...values) {
    asked = values;
    store({ values, why: "reload" });
    return values;
  }

  /** The form's values: those of the race that a reload ended, if there was one and the form is still the same. */
  const askedBefore = (now) => (ended && ended.values.length === now.length ? ended.values : now);

  function mountReload(line) {
    if (ended) line.textContent = WORDS[ended.why] ?? WORDS.reload;
  }

  // While the page goes away, its race fails; that is no end of it.
  let leaving = false;
  window.addEventListener("pagehide", () => (leaving = true));
  window.addEventListener("pageshow", () => (leaving = false));
  window.addEventListener("beforeunload", () => {
    leaving = true;
    setTimeout(() => (leaving = false), 5000);
  });

  on("phase", (phase) => {
    if (leaving || phase === "waiting" || phase === "ready") return;
    if (phase !== "running") store(why === "lost" ? { values: asked, why } : null);
    why = "reload";
  });

  /** The server was lost in the middle of a race: Gradio reloads the page once it is back. */
  const cutOff = () => (why = "lost");

  Object.assign(window.Bass, { asking, askedBefore, ended: Boolean(ended), mountReload, cutOff });
})();
