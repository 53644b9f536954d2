/* Contract: passes values from the server to the parts of the page that draw them, and shows the status line.
   Model text reaches the document through textContent alone. */
(() => {
  "use strict";
  const listeners = { log: [], view: [], charts: [], phase: [] };
  const last = { log: null, view: null, charts: null, phase: "ready" };

  function tell(kind, value) {
    last[kind] = value;
    for (const listener of listeners[kind]) listener(value);
  }

  /** Call `listener` now, if there is a value yet, and at every later one. */
  function on(kind, listener) {
    listeners[kind].push(listener);
    if (last[kind] !== null) listener(last[kind]);
  }

  /** "12.3"; "n/a" for what is not known, which is never shown as 0. */
  function number(value, digits = 1, unit = "") {
    if (value === null || value === undefined || !Number.isFinite(value)) return "n/a";
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + unit;
  }

  function setText(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  /** The log goes on as text, of which listeners read what is new to them; the others are parsed. */
  function mountFeed(kind, props, watch) {
    watch("value", () => props.value && tell(kind, kind === "log" ? props.value : JSON.parse(props.value)));
  }

  const PHASES = { waiting: "Waiting for the device…", stopped: "Stopped." };

  function mountStatus(element, props, watch) {
    const line = element.querySelector(".message");
    const busy = () => ["waiting", "running"].includes(last.phase);
    const show = (phase, message) => {
      // Stop with nothing under way is no news, nor is that a stopped race ended without its last word.
      if (["stopped", "lost"].includes(phase) && !busy()) return;
      setText(line, message || PHASES[phase] || "");
      tell("phase", phase === "lost" ? "error" : phase);
      line.dataset.phase = last.phase;
    };
    watch("value", () => {
      if (!props.value) return;
      const { phase, message } = JSON.parse(props.value);
      show(phase, message);
    });
    document.addEventListener("click", (event) => {
      if (event.target.closest("#stop")) show("stopped");
      const run = event.target.closest("#run");
      if (run && !run.disabled && !busy()) show("waiting");
    });
  }

  window.Bass = { on, number, setText, mountFeed, mountStatus };
})();
