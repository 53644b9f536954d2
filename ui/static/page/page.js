/* Passes values from the server to the scripts that draw them, and schedules the drawing.
   - Values are passed on in order. While values are held, none is passed on.
   - Events: adopted (page/ahead.js), start (the head of a run), text and line (one snapshot's part of the log, as JSON and parsed), view, charts,
     phase, measuring, form (the settings that Run would send), tape, instant (race/tape.js), playhead, touched
     (race/playhead.js), opening and scene (race/opening.js), round (the round
     that the visitor chose: {lane, row, round}).
   - Model text reaches the document only through textContent.
   - soon(draw) calls `draw` once in a coming frame, even if requested several times, or at once in a hidden page.
   - whole(draw) calls `draw` at the end of a race, because only parts in view are drawn during it. */
const listeners = {}, last = {};

export function tell(kind, value) {
  if (kind !== "text" && kind !== "line") last[kind] = value;
  for (const listener of listeners[kind] ?? []) listener(value);
}

/** Call `listener` with every later value of this kind, and with the newest so far unless the kind is text or line. */
export function on(kind, listener) {
  (listeners[kind] ??= []).push(listener);
  if (last[kind] !== undefined) listener(last[kind]);
}

// Formats by their number of decimals. toLocaleString would make a new one for each number.
const formats = [];

/** A number such as "12.3", or "n/a" for a missing value, which must never look like 0. */
export function number(value, digits = 1, unit = "") {
  if (value === null || value === undefined || !Number.isFinite(value)) return "n/a";
  formats[digits] ??= new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return formats[digits].format(value) + unit;
}

export const percent = (value, digits = 0) => number(Number.isFinite(value) ? 100 * value : null, digits, " %");

/** A share of a device's peak. A peak that is exceeded is too low, or a cache helped: more than 100 % claims nothing. */
export const used = (share) => (share > 1 ? "above 100 %" : percent(share, 1));

/** The number of leading items, out of `count`, for which `holds(i)` is true. `holds` must be false for all items
    after them. */
export function bisect(count, holds) {
  let low = 0, high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (holds(middle)) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A new element with a class and a text. */
export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== "") element.textContent = text;
  return element;
}

/** A new SVG element. */
export function svg(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== "") element.textContent = text;
  return element;
}

/** The button that opens the formula of a figure, as `formula_button` in ui/race/formulas.py makes it. */
export function what(key) {
  const button = make("button", "what");
  const name = document.querySelector(`#what-${key} strong`)?.textContent ?? "";
  const attributes = { type: "button", popovertarget: `what-${key}`, "aria-label": `Formula: ${name}`, "aria-describedby": `what-${key}` };
  for (const [name, value] of Object.entries(attributes)) button.setAttribute(name, value);
  return button;
}

/** A word that opens its explanation, as `term` in ui/race/formulas.py makes it. */
export function term(key, label) {
  const button = make("button", "term", label), id = `what-${key.replace(" ", "-")}`;
  button.type = "button";
  button.setAttribute("popovertarget", id);
  button.title = document.getElementById(id)?.lastChild.textContent.trim() ?? "";
  return button;
}

/** A row of a table, or its `head`. The first cell is a heading. */
export function tableRow(cells, head = false) {
  const row = make("tr");
  row.append(...cells.map((text, i) => {
    const cell = make(head || i === 0 ? "th" : "td", "", text);
    if (cell.tagName === "TH") cell.scope = head ? "col" : "row";
    return cell;
  }));
  return row;
}

// After a frame, pause for BUSY times its duration, because drawing may slow down models on the same machine. Pause
// for at most LONGEST_MS, so that the texts grow smoothly.
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

export function soon(draw) {
  // A repeated request moves to the end, so a part that copies another part's figures draws after it.
  wanted.delete(draw);
  wanted.add(draw);
  if (document.hidden) drawAll();
  else if (!waiting) request();
}

/** Whether Escape closes an explanation or a dialog that lies over the page, so that it means nothing else. */
export const overlaid = () => document.querySelector(":popover-open, dialog[open]") !== null;

/** Whether a race in this phase has ended. */
export const over = (phase) => ["done", "error", "stopped"].includes(phase);
export const busy = (phase) => phase === "waiting" || phase === "running";
const draws = [];
// With the timeout, drawings that already wait for a frame come first.
on("phase", (phase) => over(phase) && draws.forEach((draw) => setTimeout(draw)));
export const whole = (draw) => draws.push(draw);

/** Pass on a value that has waited. Lines of the log are parsed here, not when they arrive. */
function pass(kind, value) {
  tell(kind, value);
  if (kind === "text") tell("line", JSON.parse(value));
}

/** Values that wait to be shown. */
export const player = {
  queue: [], held: false,

  push(kind, value) {
    // After Stop, values that the server sent earlier may still arrive, even after a recording has been played. A phase
    // belongs to the next race, which may be refused before its log begins (status.js ignores those of a stopped race).
    if (log.stopped && kind !== "phase" || last.phase === "stopped" || last.phase === "playing") return;
    this.queue.push({ kind, value });
    if (!this.held) this.play();
  },

  play() {
    while (this.queue.length) {
      const { kind, value } = this.queue.shift();
      pass(kind, value);
    }
  },

  clear() {
    this.queue.length = 0;
    this.held = false;
  },

  /** Hold back all further values, or show all held ones at once. */
  hold(on) {
    this.held = on;
    if (!on) this.play();
  },

  /** Show the values of one more snapshot. Returns false if none are waiting. */
  next() {
    while (this.queue.length) {
      const { kind, value } = this.queue.shift();
      pass(kind, value);
      if (kind === "text") return true;
    }
    return false;
  },
};

/** State of the log (ui/race/feed.py).
    - head: the head of the run, as text.
    - first, next, number: indices of the text's first line, of the next line to pass on, and of the first unread line.
    - offset: where the first unread line begins in the text.
    - fetching: whether missed lines have been requested.
    - newest: the text.
    - views: views and charts that wait for their run or for missed lines.
    - stopped: whether Stop ended the run. */
const log = {
  head: null, run: null, first: -1, number: 0, next: 0, offset: 0, fetching: false, newest: "", views: {}, stopped: false,
};
on("phase", (phase) => phase === "stopped" && (log.stopped = true));

/** A copy of a text. The results of slice and split would keep the whole original in memory. */
const copied = (text) => JSON.parse(JSON.stringify(text));

/** Pass on the lines of a text that have not been read yet. `number` is the index of its first line. Returns the
    index after the last. */
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
    Object.assign(log, { head: copied(text.slice(0, end)), run: head.run, first: -1, next: 0, fetching: false });
    log.stopped = last.phase === "stopped";
    player.push("start", head);
  }
  log.newest = text;
  if (log.fetching) return;
  if (first > log.next) return fetchMissed(server);
  // The server has restarted the log with its newest lines, so the first line has another index.
  if (first !== log.first) Object.assign(log, { first, number: first, offset: start });
  log.number = readLines(text.slice(log.offset), log.number);
  log.offset = text.length;
  for (const [kind, value] of Object.entries(log.views)) showView(kind, value);
}

/** Fetch the lines between the last one read and the first one in the log, e.g. after a while in a hidden tab. */
async function fetchMissed(server) {
  const { run } = log;
  log.fetching = true;
  const lines = await server.missed([run, log.next]).catch(() => "");
  if (log.run !== run || log.stopped) return;
  log.fetching = false;
  readLines(lines, log.next);
  // Without an answer, continue with the lines in the log.
  if (!lines) log.next = Number(log.newest.split("\n", 2)[1]);
  log.first = -1;
  readLog(log.newest, server);
  // The end of the race may have been announced before these lines: announce it again after them.
  const phase = player.queue.findLast(({ kind }) => kind === "phase")?.value ?? last.phase;
  if (over(phase)) player.push("phase", phase);
}

/** Show a view or charts. If they arrive before the log of their run, keep them until it comes. */
function showView(kind, value) {
  delete log.views[kind];
  if (log.run !== value.run || log.fetching) log.views[kind] = value;
  else player.push(kind, value);
}

export function mountFeed(kind, props, watch, server) {
  watch("value", () => {
    if (!props.value) return;
    if (kind === "log") readLog(props.value, server);
    else showView(kind, JSON.parse(props.value));
  });
}

/** The form calls this with the names and values of its settings, at the start and on every change. */
export const form = (names, values) => tell("form", Object.fromEntries(names.map((name, i) => [name, values[i]])));

last.phase = "ready";
