/* One time axis for all lanes, above their texts.
   - A bar is a step of a lane: as wide as its time, as high as the tokens that it wrote in all rows. The lighter edge is the
     share of its drafts. A flag marks a lane's end: a lane that was stopped or has failed has none. Reading a prompt has no width (times.js): it is hatched, and the time
     that it took is written next to the bars.
   - The whole race is shown. During a live race the scale grows in steps.
   - Everything to the right of the playhead is covered. Once a race was seen, its bars shine through.
   - Dragging on the axis moves the playhead. A click on a bar, or Enter, goes to its step and opens it in the inspector.
   - The event readers has a predicted race for another number of readers (sweep/readers.js), as {race, words}, or null: the
     axis plays its bars within PLAYED_MS instead of the race's. They open nothing.
   - figure.bars lists the drawn bars of a lane: {x, width, height, begin, end, round}, in CSS pixels of its track, and
     figure.flags the ends: {lane: race time}. */
import { on, tell, soon, number, over, setText, make, whole } from "bass/page/page.js";
import { run, laneName, lookOf } from "bass/race/run.js";
import { clock, wear } from "bass/race/predicted.js";
import { EPSILON } from "bass/race/times.js";
import { tape } from "bass/race/tape.js";
import { plots } from "bass/page/plots.js";
import { inspect } from "bass/race/inspector.js";

// Lengths of the axis of a live race, in ms. A longer one is a multiple of the last.
const SPANS = [100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 60_000, 120_000, 300_000, 600_000];
const TICKS = 7, DRAG_PX = 5, PLAYED_MS = 1500, STILL = window.matchMedia("(prefers-reduced-motion: reduce)"), SPEEDS = { 1: "real speed", 0.25: "1/4 speed", 0.1: "1/10 speed" };
const seconds = (ms, digits = 2) => number(ms / 1000, digits, " s");
const count = (tokens) => `${tokens} ${tokens === 1 ? "token" : "tokens"}`;

/** The mean step of the first `steps` rounds in words. */
function means({ total, end }, steps) {
  const tokens = number(total / steps, total % steps ? 1 : 0);
  return `${tokens} ${tokens === "1" ? "token" : "tokens"} in ${number(end / steps, end < 10 * steps ? 1 : 0)} ms`;
}

/** One round in words. */
function describe({ record, kind, begin, end, draft, verify, written }) {
  const ms = (value) => number(value, 1), head = `${wear(`Round ${record.round}`)}: ${count(written)} in ${ms(end - begin)} ms`;
  if (draft === null || verify === null) return head;
  const forwards = record.draft_forwards, by = forwards ? ` by ${forwards} ${forwards === 1 ? "forward" : "forwards"}` : "";
  const own = kind === "plain" ? "plain step" : "verification";
  return `${head} = ${draft ? `drafts ${ms(draft)}${by} + ` : ""}${own} ${ms(verify)} + host ${ms(Math.max(0, end - begin - draft - verify))}`;
}

/** A pattern of diagonal lines. */
function hatch(context, colour) {
  const tile = Object.assign(document.createElement("canvas"), { width: 5, height: 5 }), pen = tile.getContext("2d");
  pen.strokeStyle = colour;
  pen.lineWidth = 1.4;
  for (const shift of [-5, 0, 5]) {
    pen.moveTo(shift, 5);
    pen.lineTo(shift + 5, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

/** The bars of one lane, and its name, its means so far, and its flag. */
class Track {
  constructor(axis, name) {
    Object.assign(this, { axis, name, at: null, look: null });
    this.row = make("div", "axis-lane");
    this.row.dataset.axis = name;
    const { colour } = lookOf(name), label = make("div", "axis-name");
    this.row.style.setProperty("--lane", `var(--${colour})`);
    this.means = make("span", "axis-means");
    label.append(make("b", "", laneName(name)), this.means);
    this.read = make("span", "axis-read");
    this.read.append(make("b"), make("small"));
    this.canvas = make("canvas");
    this.flag = make("span", "axis-flag");
    this.flag.hidden = true;
    Object.assign(this.canvas, { tabIndex: 0 });
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", `${laneName(name)}: no step yet`);
    this.track = make("div", "axis-track");
    this.track.append(this.canvas, this.flag);
    this.row.append(label, this.read, this.track);
    // Reading the size from the canvas would lay out all texts before each drawing.
    this.size = null;
    new ResizeObserver(([{ contentRect }]) => {
      Object.assign(this, { size: contentRect, look: null });
      soon(axis.drawn);
    }).observe(this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(this.roundAt(event)));
    for (const kind of ["pointerleave", "blur"]) this.canvas.addEventListener(kind, () => this.point(null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  get lane() {
    return this.axis.race?.lanes.get(this.name);
  }

  /** Draw the bars: only the new ones if the others stay as they are. */
  draw() {
    const printing = document.body.classList.contains("printing");
    const { lane, canvas } = this, { end, most } = this.axis, measured = () => canvas.getBoundingClientRect();
    const { width, height } = printing ? measured() : (this.size ??= measured());
    if (!lane || !width) return;
    const context = canvas.getContext("2d"), fine = printing ? 3 : 1;
    const ratio = Math.max(window.devicePixelRatio || 1, fine), scale = width / end;
    this.look ??= this.looks(context);
    const picture = [lane, this.look, this.at, width, height, ratio, scale, most];
    if (picture.some((value, i) => value !== this.picture?.[i])) {
      if (canvas.width !== Math.round(width * ratio)) canvas.width = Math.round(width * ratio);
      if (canvas.height !== Math.round(height * ratio)) canvas.height = Math.round(height * ratio);
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, height);
      // The browser computes the style of all texts before it sets the font, as before it returns a colour.
      Object.assign(context, { font: this.look.font, textAlign: "center", textBaseline: "middle" });
      Object.assign(this, { picture, reads: 0 });
      this.row.bars = [];
    }
    const { bars } = this.row, from = bars.length, reads = this.reads;
    if (from && from === lane.rounds.length && reads === lane.reads.length) return;
    for (const { begin, end: until, written, record } of lane.rounds.slice(from)) {
      bars.push({
        x: begin * scale, width: (until - begin) * scale, height: Math.max(2, (height - 1) * written / most), begin, end: until, round: record.round,
      });
    }
    this.paint(context, height, scale, from);
    this.numbers(context, height, from);
    context.fillStyle = this.look.reading;
    // Marks without width, 5 pixels wide so that they can be seen. A new bar may have covered half of an older mark.
    lane.reads.forEach(({ at }, i) => {
      if (i && (i >= reads || bars[from]?.x < at * scale + 2.5)) context.fillRect(at * scale - 2.5, 0, 5, height);
    });
    this.reads = lane.reads.length;
    if (this.at) this.frame(context, height, scale);
  }

  /** Colours and font. They are kept, because the browser computes the style of all texts before it answers. */
  looks(context) {
    const colour = plots.palette(this.row), size = Math.min(11 * plots.type(), 0.62 * this.size.height), [card, ink, lane] = ["card", "ink", "lane"].map(colour);
    return { card, ink, lane, size, font: `600 ${size}px ${colour.font}`, reading: hatch(context, colour("soft")) };
  }

  paint(context, height, scale, from) {
    const { rounds } = this.lane;
    context.fillStyle = this.look.lane;
    this.row.bars.slice(from).forEach(({ x, width, height: tall }, i) => {
      // A gap between bars, where there is room for it.
      const gap = width > 4 ? 1 : 0, { draft } = rounds[from + i], edge = Math.min(width - gap, (draft ?? 0) * scale);
      if (edge > 0) {
        context.globalAlpha = 0.45;
        context.fillRect(x, height - tall, edge, tall);
        context.globalAlpha = 1;
      }
      context.fillRect(x + edge, height - tall, width - gap - edge, tall);
    });
  }

  /** Write the tokens of each step into its bar or above it, if there is room. */
  numbers(context, height, from) {
    const { size, card, ink } = this.look;
    this.row.bars.slice(from).forEach(({ x, width, height: tall }, i) => {
      const { written } = this.lane.rounds[from + i], text = number(written, written % 1 ? 1 : 0);
      if (width < 0.6 * size * text.length + 2) return;
      const inside = tall > size + 4, above = height - tall > size;
      if (!inside && !above) return;
      context.fillStyle = inside ? card : ink;
      context.fillText(text, x + width / 2, inside ? height - tall / 2 + 0.5 : height - tall - size / 2);
    });
  }

  frame(context, height, scale) {
    const { begin, end } = this.at;
    context.strokeStyle = this.look.ink;
    context.lineWidth = 2;
    context.strokeRect(begin * scale + 1, 1, Math.max(2, (end - begin) * scale - 2), height - 2);
  }

  /** Show the means of the steps so far, the time for the prompts, and the flag of a lane that has ended by `ms`. */
  show(ms) {
    const { lane } = this, done = lane ? lane.indexAt(ms) : 0, newest = lane?.rounds[done - 1];
    setText(this.means, newest ? means(newest, done) : "");
    // A long time in ms would cover the hatched prompt.
    const read = (time) => (time < 1000 ? `${number(time, 0)} ms` : seconds(time, 1));
    setText(this.read.firstChild, lane?.reads.length ? `${read(lane.reading)} ` : "");
    setText(this.read.lastChild, lane?.reads.length ? "to read the question" : "");
    this.row.classList.toggle("has-read", Boolean(lane?.reads.length));
    const flag = this.axis.flags[this.name];
    this.flag.hidden = flag === undefined || flag > ms + EPSILON;
    if (this.flag.hidden) return;
    setText(this.flag, seconds(flag));
    this.flag.style.left = `${100 * flag / this.axis.end}%`;
  }

  /** The race time under the pointer. */
  timeAt({ clientX }) {
    const { left, width } = this.canvas.getBoundingClientRect();
    return (clientX - left) / width * this.axis.end;
  }

  /** The round under the pointer, unless it is covered. */
  roundAt(event) {
    if (this.axis.predicted) return null;
    const ms = this.timeAt(event), round = this.lane?.rounds[this.lane.indexAt(ms)];
    return round && ms >= round.begin && (this.axis.seen || round.begin <= tape.state.ms) ? round : null;
  }

  /** Select a round. The line below the axis then describes it. */
  point(round) {
    if (round === this.at) return;
    this.at = round;
    this.axis.describe(round && `${laneName(this.name)}, ${describe(round)}`);
    soon(this.axis.drawn);
  }

  /** Go to the end of a round, unless it is that of a live race, and open it in the inspector. */
  open(round) {
    if (!round) return;
    if (!tape.state.follows || tape.state.complete) {
      tell("touched");
      tape.seek(round.end);
    }
    const number = round.record.round, row = round.record.rows[0].sequence;
    const step = run()?.lanes.get(this.name)?.sequences[row].steps.find((one) => one.round === number && one.kind !== "prefill");
    if (step) inspect?.(this.name, row, step);
  }

  key(event) {
    if (!this.lane || this.axis.predicted || event.ctrlKey || event.altKey || event.metaKey) return;
    const { rounds } = this.lane, end = rounds.length - 1, now = rounds.indexOf(this.at);
    const next = { ArrowRight: now < 0 ? 0 : Math.min(now + 1, end), ArrowLeft: now < 0 ? end : Math.max(now - 1, 0),
      Home: 0, End: end }[event.key];
    if (event.key === "Enter") this.open(this.at);
    else if (event.key === "Escape" && this.at) this.point(null);
    else if (next !== undefined && rounds[next]) {
      this.point(rounds[next]);
      setText(this.axis.spoken, describe(rounds[next]));
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

class Axis {
  constructor(root) {
    this.element = root.querySelector(".axis");
    this.spoken = root.querySelector(".board-spoken");
    const part = (name) => this.element.querySelector(`.axis-${name}`);
    Object.assign(this, { rows: part("lanes"), ruler: part("ruler"), cover: part("cover"), line: part("line"), slider: part("slider"), words: part("words") });
    this.buttons = Object.fromEntries([...this.element.querySelectorAll("[data-tape]")].map((e) => [e.dataset.tape, e]));
    this.speeds = [...this.element.querySelectorAll("[data-speed]")];
    Object.assign(this, { tracks: [], seen: false, end: 1, most: 1, flags: {}, about: null, predicted: null, finished: new Set(), failed: new Set() });
    this.drawn = () => this.draw();
    this.bind();
    on("start", (head) => this.start(head));
    on("readers", (predicted) => this.predict(predicted));
    on("line", () => tape.replaying || soon(this.drawn));
    on("view", (view) => this.take(view));
    // While the page follows a race, the axis changes only with its bars.
    on("playhead", (head) => this.predicted || head.follows && !tape.state.ended || this.move(head));
    for (const kind of ["phase", "instant"]) on(kind, () => soon(this.drawn));
    on("phase", (phase) => {
      if (over(phase)) this.seen = true;
      // Measure the canvases again, in case the observer's newest report was lost.
      for (const track of this.tracks) track.size = null;
    });
    on("tape", (change) => (this.seen = change === "back"));
    whole(() => this.draw());
    plots.onTheme(() => {
      for (const track of this.tracks) track.look = null;
      this.draw();
    });
    this.show([...root.querySelectorAll(".lane[data-lane]")].map(({ dataset }) => dataset.lane));
  }

  bind() {
    const { play, back, next, live } = this.buttons;
    const act = (does) => () => {
      tell("touched");
      does();
    };
    play.addEventListener("click", act(() => (tape.state.playing ? tape.pause() : tape.play())));
    back.addEventListener("click", act(() => tape.step(-1)));
    next.addEventListener("click", act(() => tape.step(1)));
    live.addEventListener("click", act(() => tape.live()));
    for (const button of this.speeds) {
      button.addEventListener("click", () => {
        const speed = Number(button.dataset.speed), inUse = tape.state.playing && tape.speed === speed;
        // This may end the opening, which changes the speed.
        tell("touched");
        // The speed in use, pressed again, pauses.
        if (inUse) return tape.pause();
        tape.speed = speed;
        tape.play();
      });
    }
    this.slider.addEventListener("input", act(() => tape.seek(Number(this.slider.value), true)));
    this.slider.addEventListener("keydown", (event) => this.key(event));
    this.rows.addEventListener("pointerdown", (event) => this.drag(event));
  }

  /** Drag the playhead, or click a bar. */
  drag(event) {
    const track = this.tracks.find(({ canvas }) => canvas === event.target);
    if (!track?.lane || event.button) return;
    const from = event.clientX;
    let dragged = false;
    const move = (now) => {
      dragged ||= Math.abs(now.clientX - from) > DRAG_PX;
      if (!dragged) return;
      tell("touched");
      tape.seek(track.timeAt(now), true);
    };
    const end = (now) => {
      for (const [kind, listener] of Object.entries(listeners)) track.canvas.removeEventListener(kind, listener);
      if (!dragged && now.type === "pointerup") track.open(track.roundAt(now));
    };
    const listeners = { pointermove: move, pointerup: end, pointercancel: end };
    track.canvas.setPointerCapture(event.pointerId);
    for (const [kind, listener] of Object.entries(listeners)) track.canvas.addEventListener(kind, listener);
  }

  key(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const { ms, end, playing } = tape.state;
    const to = { Home: 0, End: end, PageUp: ms + end / 10, PageDown: ms - end / 10 }[event.key];
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (to === undefined && !by && event.key !== " ") return;
    event.preventDefault();
    event.stopPropagation();
    tell("touched");
    if (to !== undefined) tape.seek(to);
    else if (by) tape.step(by);
    else (playing ? tape.pause : tape.play)();
  }

  get race() {
    return this.predicted?.race ?? tape.race;
  }

  /** Play predicted bars, or show the race's own again. */
  predict(predicted) {
    const { lanes } = predicted?.race.head ?? this.head;
    Object.assign(this, { predicted, began: performance.now() });
    this.element.classList.toggle("predicting", Boolean(predicted));
    if (lanes.join() !== this.tracks.map(({ name }) => name).join()) this.show(lanes);
    soon(this.drawn);
  }

  show(lanes) {
    this.tracks = lanes.map((name) => new Track(this, name));
    this.rows.replaceChildren(...this.tracks.map(({ row }) => row));
  }

  start(head) {
    if (head === this.head) return;
    Object.assign(this, { head, flags: {}, finished: new Set(), failed: new Set(), about: null });
    setText(this.spoken, "");
    this.show(head.lanes);
    soon(this.drawn);
  }

  take({ lanes }) {
    for (const [name, { finished, error, timeline }] of Object.entries(lanes)) {
      if (error) this.failed.add(name);
      if (finished) this.finished.add(name);
      // Draft and target work at the same time.
      const track = timeline && this.tracks.find((one) => one.name === name);
      if (track) track.overlap = timeline.note ?? `${timeline.rolled_back} roll-backs, ${timeline.thrown_away} drafts thrown away`;
    }
    soon(this.drawn);
  }

  /** Draw all bars and the ruler, and then the playhead. */
  draw() {
    const { race, predicted } = this, { follows, ended, recorded } = tape.state;
    if (!race || !predicted && race.head !== this.head) return;
    const longest = Math.max(race.end, 1), whole = Boolean(predicted || recorded || ended || !follows);
    this.end = whole ? longest : SPANS.find((span) => span >= longest) ?? SPANS.at(-1) * Math.ceil(longest / SPANS.at(-1));
    this.most = race.most;
    // A recording shows flags before it has shown the views in which its lanes finish.
    const flagged = (name) => predicted || (ended === "done" || this.finished.has(name)) && !this.failed.has(name);
    this.flags = Object.fromEntries([...race.lanes].filter(([name]) => flagged(name)).map(([name, { clock: at }]) => [name, at]));
    this.element.flags = this.flags;
    for (const track of this.tracks) {
      track.draw();
      const about = `${laneName(track.name)}: ${track.lane.rounds.length} steps; arrow keys select one, Enter opens it${track.overlap ? `; ${track.overlap}` : ""}`;
      track.canvas.setAttribute("aria-label", clock() ? `${about}, predicted` : about);
    }
    this.ticks();
    if (!predicted) return this.move(tape.state);
    // In a hidden tab `soon` draws at once, and would draw again and again until the bars have played.
    const played = STILL.matches || document.hidden ? 1 : Math.min(1, (performance.now() - this.began) / PLAYED_MS);
    this.move({ ms: played * race.end });
    if (played < 1) soon(this.drawn);
  }

  ticks() {
    const key = `${this.end} ${Boolean(clock())}`;
    if (this.ticked === key) return;
    this.ticked = key;
    const raw = this.end / TICKS, unit = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].find((by) => by * unit >= raw) * unit;
    const digits = Math.max(0, Math.ceil(-Math.log10(step / 1000) - 1e-9));
    const marks = Array.from({ length: Math.floor(this.end / step + 1e-9) + 1 }, (_, i) => {
      const mark = make("span", "", i ? number(i * step / 1000, digits) : "0 s");
      mark.style.left = `${100 * i * step / this.end}%`;
      return mark;
    });
    this.ruler.replaceChildren(...marks);
  }

  /** Move the playhead, its cover, and the words next to them. */
  move({ ms, speed, playing, follows }) {
    const { predicted } = this, { race, state } = tape;
    if (!race || !predicted && race.head !== this.head) return;
    const share = `${Math.min(100, 100 * ms / this.end)}%`;
    // Moving its edge would count as a shift of the layout.
    this.cover.style.clipPath = `inset(0 0 0 ${share})`;
    this.line.style.translate = `${Math.min(100, 100 * ms / this.end)}cqi`;
    this.cover.hidden = follows;
    this.line.hidden = Boolean(predicted) || follows && !state.ended;
    this.element.classList.toggle("seen", this.seen && !predicted);
    for (const track of this.tracks) track.show(follows ? Infinity : ms);
    if (predicted) this.slider.disabled = true;
    else this.controls(state, playing, speed);
    if (this.about === null) setText(this.words, this.time(state));
  }

  /** The time of the playhead and the speed in use, in words. */
  time({ ms, end, playing, speed, follows, ended }) {
    if (this.predicted) return this.predicted.words;
    if (follows && !ended) return wear("live");
    const pace = playing ? ` at ${SPEEDS[speed] ?? `1/${Number((1 / speed).toPrecision(2))} speed`}` : "";
    return wear(`${ms < end - EPSILON ? `${seconds(ms)} of ` : ""}${seconds(end)}${pace}`);
  }

  controls({ ms, end, count: instants, recorded, ended, held, pending, away, follows }, playing, speed) {
    const none = !instants || held || pending, { play, back, next, live } = this.buttons, at = ms < end - EPSILON;
    for (const control of [play, next, this.slider, ...this.speeds]) control.disabled = none;
    back.disabled = none || ms <= EPSILON;
    live.disabled = none || (recorded ? !at : !away);
    live.hidden = Boolean(recorded || ended) && !at;
    setText(live, recorded || ended ? "End" : "Live");
    setText(play, playing ? "Pause" : at || follows && !ended ? "Play" : "Replay");
    for (const button of this.speeds) button.setAttribute("aria-pressed", String(Number(button.dataset.speed) === speed));
    this.slider.max = this.end;
    this.slider.value = ms;
    const { race } = tape, written = [...race.lanes.values()].map((lane) => {
      const tokens = lane.rounds[lane.indexAt(ms) - 1]?.total ?? 0;
      return `${laneName(lane.name)} ${count(tokens)}`;
    });
    this.slider.setAttribute("aria-valuetext", wear(`${seconds(ms)}: ${written.join(", ")}`));
  }

  /** Show these words in place of the time. null shows the time. */
  describe(words) {
    this.about = words;
    setText(this.words, words ?? this.time(tape.state));
  }
}

export const mountAxis = (root) => new Axis(root);
