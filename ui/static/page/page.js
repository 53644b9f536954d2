/* Passes values from the server to the scripts that draw them, and shows the status line. Contract: values are passed
   on in order; at half speed, at half the pace at which they came; while they are held, not at all.
   Events: start (a run's head), line (what one snapshot adds to the log), view, charts, phase, measuring. Model text reaches the
   document through textContent alone. */
(() => {
  "use strict";
  const listeners = {}, last = {};
  const TICK_MS = 33;

  function tell(kind, value) {
    last[kind] = value;
    for (const listener of listeners[kind] ?? []) listener(value);
  }

  /** Call `listener` with every later value of this kind, and with the newest so far unless it is a line. */
  function on(kind, listener) {
    (listeners[kind] ??= []).push(listener);
    if (kind !== "line" && last[kind] !== undefined) listener(last[kind]);
  }

  /** "12.3"; "n/a" for a missing value, which is never shown as 0. */
  function number(value, digits = 1, unit = "") {
    if (value === null || value === undefined || !Number.isFinite(value)) return "n/a";
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + unit;
  }

  function setText(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  /** A new element with a class and a text. */
  function make(tag, className = "", text = "") {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== "") element.textContent = text;
    return element;
  }

  /** Values that wait to be shown. `lag`: how many ms the page is behind the server at half speed. */
  const player = {
    queue: [], lag: 0, slow: false, held: false, timer: null, ticked: 0,

    push(kind, value) {
      // After Stop, values that the server sent before may still arrive.
      if (last.phase === "stopped") return;
      const now = performance.now();
      this.queue.push({ at: now, kind, value });
      if (this.held) return;
      if (!this.slow && this.lag === 0) this.play(now);
      else if (this.timer === null) {
        this.ticked = now;
        this.timer = setInterval(() => this.tick(), TICK_MS);
      }
    },

    play(until) {
      while (this.queue.length && this.queue[0].at <= until) {
        const { kind, value } = this.queue.shift();
        tell(kind, value);
      }
    },

    tick() {
      const now = performance.now();
      if (this.held) return;
      this.lag = this.slow ? this.lag + (now - this.ticked) / 2 : 0;
      this.ticked = now;
      this.play(now - this.lag);
      if (this.queue.length || (this.slow && last.phase === "running")) return;
      clearInterval(this.timer);
      Object.assign(this, { timer: null, lag: 0 });
    },

    clear() {
      this.queue.length = 0;
      this.held = false;
    },

    hold(on) {
      this.held = on;
      if (on || !this.queue.length) return;
      this.lag = 0;
      this.play(performance.now());
    },

    /** Show what one more snapshot brought; false if nothing waits. */
    next() {
      while (this.queue.length) {
        const { kind, value } = this.queue.shift();
        tell(kind, value);
        if (kind === "line") return true;
      }
      return false;
    },
  };

  /** The log only grows: its first line is the run's head, each further line comes from one snapshot. */
  const log = { run: null, offset: 0, views: {} };

  function readLog(text) {
    const end = text.indexOf("\n");
    const head = end < 0 ? text : text.slice(0, end);
    if (head !== log.run) {
      Object.assign(log, { run: head, offset: head.length });
      player.push("start", JSON.parse(head));
    }
    for (const line of text.slice(log.offset).split("\n")) if (line) player.push("line", JSON.parse(line));
    log.offset = text.length;
    const id = JSON.parse(head).run;
    for (const kind of Object.keys(log.views)) if (log.views[kind].run === id) showView(kind, log.views[kind]);
  }

  /** A view or charts may arrive before the log that starts their run; they are kept until then. */
  function showView(kind, value) {
    delete log.views[kind];
    if (log.run === null || JSON.parse(log.run).run !== value.run) log.views[kind] = value;
    else player.push(kind, value);
  }

  function mountFeed(kind, props, watch) {
    watch("value", () => {
      if (!props.value) return;
      if (kind === "log") readLog(props.value);
      else showView(kind, JSON.parse(props.value));
    });
  }

  const PHASES = { waiting: "Waiting for the device…", stopped: "Stopped." };

  function mountStatus(element, props, watch) {
    const line = element.querySelector(".message");
    const busy = () => ["waiting", "running"].includes(last.phase);
    on("phase", (phase) => (line.dataset.phase = phase));
    const show = (phase, message) => {
      // Nothing to say: Stop without a race, or a stopped race that ends without its last snapshot.
      if (["stopped", "lost"].includes(phase) && !busy()) return;
      setText(line, message || PHASES[phase] || "");
      if (phase === "stopped" || phase === "waiting") player.clear();
      // The end of a run is announced after the values that still wait to be shown.
      if (phase === "done" || phase === "error") player.push("phase", phase);
      else tell("phase", phase === "lost" ? "error" : phase);
    };
    window.Bass.lost = (message) => show("lost", message);
    watch("value", () => {
      if (!props.value) return;
      const { phase, message, measuring } = JSON.parse(props.value);
      show(phase, message);
      tell("measuring", measuring ?? null);
    });
    document.addEventListener("click", (event) => {
      if (event.target.closest("#stop")) show("stopped");
      const run = event.target.closest("#run");
      if (run && !run.disabled && !busy()) show("waiting");
    });
  }

  /** Turn half speed on or off; off shows all waiting values at once. */
  function halfSpeed(on) {
    player.slow = on;
  }

  /** Hold all further values back, or show at once those that were held. */
  const hold = (on) => player.hold(on);
  const next = () => player.next();

  last.phase = "ready";
  window.Bass = { on, number, setText, make, mountFeed, mountStatus, halfSpeed, hold, next };
})();
