/* Passes values from the server to the scripts that draw them, and says when to draw. Contract: values are passed on in
   order; at half speed, at half the pace at which they came; while they are held, not at all. Events: start (a run's
   head), text and line (what one snapshot adds to the log, as it came and read), view, charts, phase, measuring, form
   (the settings that Run would send); instant, see race/tape.js. Model text reaches the document through textContent
   alone. Bass.soon(draw) calls `draw` once in a coming frame, however often it was asked for; in a hidden page, at once.
   Bass.whole(draw) calls `draw` at the end of a race: during it only what is in view is drawn. */
(() => {
  "use strict";
  const listeners = {}, last = {};
  const TICK_MS = 33;

  function tell(kind, value) {
    if (kind !== "text" && kind !== "line") last[kind] = value;
    for (const listener of listeners[kind] ?? []) listener(value);
  }

  /** Call `listener` with every later value of this kind, and with the newest so far unless it is of the log. */
  function on(kind, listener) {
    (listeners[kind] ??= []).push(listener);
    if (last[kind] !== undefined) listener(last[kind]);
  }

  /** "12.3"; "n/a" for a missing value, which is never shown as 0. */
  function number(value, digits = 1, unit = "") {
    if (value === null || value === undefined || !Number.isFinite(value)) return "n/a";
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + unit;
  }

  const percent = (value, digits = 0) => number(Number.isFinite(value) ? 100 * value : null, digits, " %");

  /** How many of `count` leading items `holds` is true of, which is false of all others. */
  function bisect(count, holds) {
    let low = 0, high = count;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (holds(middle)) low = middle + 1;
      else high = middle;
    }
    return low;
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

  /** A new element of SVG. */
  function svg(tag, attributes, text = "") {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== "") element.textContent = text;
    return element;
  }

  /** The button of a figure that opens its formula, as ui/race/formulas.py makes it; the style sheet places that. */
  function what(key) {
    const button = make("button", "what");
    const name = document.querySelector(`#what-${key} strong`)?.textContent ?? "";
    const attributes = { type: "button", popovertarget: `what-${key}`, "aria-label": `Formula: ${name}`, "aria-describedby": `what-${key}` };
    for (const [name, value] of Object.entries(attributes)) button.setAttribute(name, value);
    return button;
  }

  /** A word that explains itself, as `term` of ui/race/formulas.py makes it. */
  function term(key, label) {
    const button = make("button", "term", label), id = `what-${key.replace(" ", "-")}`;
    button.type = "button";
    button.setAttribute("popovertarget", id);
    button.title = document.getElementById(id)?.lastChild.textContent.trim() ?? "";
    return button;
  }

  /** A table's row, or its `head`; the first cell of a row names it. */
  function tableRow(cells, head = false) {
    const row = make("tr");
    row.append(...cells.map((text, i) => {
      const cell = make(head || i === 0 ? "th" : "td", "", text);
      if (cell.tagName === "TH") cell.scope = head ? "col" : "row";
      return cell;
    }));
    return row;
  }

  // The pause after a frame: BUSY times its duration, at most LONGEST_MS, so that text is seen to grow. On the machine
  // that also runs the models, drawing takes time from them.
  const BUSY = 4, LONGEST_MS = 120;
  const wanted = new Set();
  let waiting = false;

  function drawAll() {
    const draws = [...wanted];
    wanted.clear();
    for (const draw of draws) draw();
  }

  function frame(start) {
    drawAll();
    // The first timer runs after this frame's layout and paint.
    setTimeout(() => setTimeout(() => {
      waiting = false;
      if (wanted.size) request();
    }, Math.min(LONGEST_MS, BUSY * (performance.now() - start))));
  }

  function request() {
    waiting = true;
    requestAnimationFrame(frame);
  }

  document.addEventListener("visibilitychange", () => document.hidden && drawAll());

  function soon(draw) {
    wanted.add(draw);
    if (document.hidden) drawAll();
    else if (!waiting) request();
  }

  /** Whether a race in this phase has ended. */
  const over = (phase) => ["done", "error", "stopped"].includes(phase);
  const busy = (phase) => phase === "waiting" || phase === "running";
  const draws = [];
  // What waits for a frame is drawn first.
  on("phase", (phase) => over(phase) && setTimeout(() => draws.forEach((draw) => draw())));
  const whole = (draw) => draws.push(draw);

  /** Tell a value that has waited; a line of the log is read now. */
  function pass(kind, value) {
    tell(kind, value);
    if (kind === "text") tell("line", JSON.parse(value));
  }

  /** Values that wait to be shown. `lag`: how many ms the page is behind the server at half speed. */
  const player = {
    queue: [], lag: 0, slow: false, held: false, timer: null, ticked: 0,

    push(kind, value) {
      // After Stop, values that the server sent before may still arrive, even after a recording has been played.
      if (log.stopped || last.phase === "stopped" || last.phase === "playing") return;
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
        pass(kind, value);
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

    /** Half speed; without it all waiting values are shown at once. */
    halfSpeed(on) {
      this.slow = on;
    },

    /** Hold all further values back, or show at once those that were held. */
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
        pass(kind, value);
        if (kind === "text") return true;
      }
      return false;
    },
  };

  /** The log, see ui/race/feed.py. head: of the run, as text; first: the number of the text's first line; next: of the
      next line to read; number: of the first unread line; offset: where that line begins in the text; asked: whether
      missed lines are on their way; newest: the text; views: those that wait for their run or for these lines; stopped:
      whether Stop ended the run. */
  const log = {
    head: null, run: null, first: -1, number: 0, next: 0, offset: 0, asked: false, newest: "", views: {}, stopped: false,
  };
  on("phase", (phase) => phase === "stopped" && (log.stopped = true));

  /** A copy. A part of a text, which slice and split give, would keep the whole text in memory. */
  const copied = (text) => JSON.parse(JSON.stringify(text));

  /** Pass on the lines, which are numbered from `number` on, without those that were read; the number after them. */
  function readLines(text, number) {
    for (const line of text.split("\n")) {
      if (!line) continue;
      if (number >= log.next) {
        log.next = number + 1;
        player.push("text", copied(line));
      }
      number += 1;
    }
    return number;
  }

  function readLog(text, server) {
    const end = text.indexOf("\n"), start = text.indexOf("\n", end + 1), first = Number(text.slice(end + 1, start));
    if (log.head === null || !text.startsWith(`${log.head}\n`)) {
      const head = JSON.parse(text.slice(0, end));
      Object.assign(log, { head: copied(text.slice(0, end)), run: head.run, first: -1, next: 0, asked: false });
      log.stopped = last.phase === "stopped";
      player.push("start", head);
    }
    log.newest = text;
    if (log.asked) return;
    if (first > log.next) return fetchMissed(server);
    // The log has started again.
    if (first !== log.first) Object.assign(log, { first, number: first, offset: start });
    log.number = readLines(text.slice(log.offset), log.number);
    log.offset = text.length;
    for (const [kind, value] of Object.entries(log.views)) showView(kind, value);
  }

  /** Ask for the lines between those that were read and the log's first one, as after a while in a hidden tab. */
  async function fetchMissed(server) {
    const { run } = log;
    log.asked = true;
    const lines = await server.missed([run, log.next]).catch(() => "");
    if (log.run !== run || log.stopped) return;
    log.asked = false;
    readLines(lines, log.next);
    // Without an answer, go on with what is there.
    if (!lines) log.next = Number(log.newest.split("\n", 2)[1]);
    log.first = -1;
    readLog(log.newest, server);
    // These lines come after the end of the race was announced: announce it again after them.
    const phase = player.queue.findLast(({ kind }) => kind === "phase")?.value ?? last.phase;
    if (over(phase)) player.push("phase", phase);
  }

  /** A view or charts may arrive before the log of their run; they are kept until then. */
  function showView(kind, value) {
    delete log.views[kind];
    if (log.run !== value.run || log.asked) log.views[kind] = value;
    else player.push(kind, value);
  }

  function mountFeed(kind, props, watch, server) {
    watch("value", () => {
      if (!props.value) return;
      if (kind === "log") readLog(props.value, server);
      else showView(kind, JSON.parse(props.value));
    });
  }

  /** Called by the form with its settings' names and values, at the start and on every change. */
  const form = (names, values) => tell("form", Object.fromEntries(names.map((name, i) => [name, values[i]])));

  last.phase = "ready";
  window.Bass = {
    on, tell, number, percent, bisect, setText, make, svg, what, term, tableRow, soon, over, busy, whole, player, mountFeed, form,
  };
})();
