/* "How many readers at once?": the slider next to the lanes, and the speed-up by the number of readers.
   - The figures are in data-figures (ui/sweep/readers.py): ms per step of Regular, and of BASS (tokens per step, ms per
     step), by machine, text and readers. Speculative serves one reader at a time: its steps are those of BASS with one.
     A machine "here" is the visitor's own. All are predicted. A race there is shown as a ring.
   - The slider stands at the race's own number of readers, and can't be moved while a race runs. At another number, the
     time axis plays predicted steps (axis.js), until the visitor goes back or touches the race.
   - The text is the one whose drafts were accepted about as often as the race's, until the visitor chooses one.
   - BASS pays as long as its speed-up is at least PAYS. */
import { on, tell, busy, over, number, setText, svg, make } from "bass/page/page.js";
import { run } from "bass/race/run.js";
import { tape } from "bass/race/tape.js";
import { Race, sum } from "bass/race/times.js";

const PAYS = 1.05;
// The tokens that each reader gets on the time axis.
const TOKENS = 40;
const CURVE = { width: 640, height: 240, left: 46, right: 14, top: 16, bottom: 26 };
const LINES = ["speculative", "bass"];

class Readers {
  constructor(root) {
    this.root = root;
    this.known = JSON.parse(root.dataset.figures);
    // Next to the lanes, which the page mounts first.
    const bar = document.querySelector(".axis-readers");
    [this.slider, this.counter] = [bar.querySelector("input"), bar.querySelector("output")];
    this.slider.addEventListener("input", () => this.predict());
    root.addEventListener("input", ({ target }) => {
      this.told ||= target.name === "readers-text";
      this.predict();
    });
    on("touched", () => this.moves || this.home());
    on("start", ({ batch_size: rows }) => this.home(rows));
    on("phase", (phase) => this.phase(phase));
    root.querySelector(".readers-curve svg").addEventListener("pointerdown", (event) => this.point(event));
    this.draw();
  }

  chosen(name) {
    return this.root.querySelector(`[data-choice="${name}"] input:checked`).value;
  }

  get machine() {
    return this.known.machines[this.chosen("machine")];
  }

  /** Stand at the race's own number of readers, if there is a race, and let the axis show it. */
  home(rows = run()?.head.batch_size) {
    // The slider ends at the last known number, and then the words alone name the race's own.
    if (rows) this.slider.value = rows;
    this.draw(rows);
    if (this.shows) tell("readers", null);
    this.shows = false;
  }

  /** Choose the text whose drafts were accepted about as often as those of the race. */
  choose() {
    const rate = tape.last?.lanes.bass?.metrics.token_acceptance;
    if (this.told || !Number.isFinite(rate)) return;
    const off = ([, { acceptance }]) => Math.abs(sum(acceptance) / acceptance.length - rate);
    const [name] = Object.entries(this.known.texts).reduce((best, text) => (off(text) < off(best) ? text : best));
    this.root.querySelector(`[data-choice="text"] [value="${name}"]`).checked = true;
  }

  /** Let the time axis play the predicted steps, unless the race has this many readers itself. */
  predict() {
    const readers = Number(this.slider.value), { recorded, ended } = tape.state;
    this.choose();
    this.draw();
    // A race of the visitor's own is being drawn.
    if (!tape.race || this.slider.disabled || !recorded && !ended) return;
    this.moves = true;
    tell("touched");
    this.moves = false;
    tape.pause();
    if (readers === run().head.batch_size) return this.home();
    const { bass } = this.steps(readers), { label } = this.machine;
    this.shows = true;
    tell("readers", {
      race: this.race(readers), words: `Predicted: ${TOKENS} tokens for each reader`,
      said: `With ${this.counted(readers)}, BASS would be ${number(bass.speed, 2)} times as fast as Regular on ${label[0].toLowerCase()}${label.slice(1)}.`,
    });
  }

  /** The steps with this many readers as a race (times.js). */
  race(readers) {
    const steps = this.steps(readers), tokens = TOKENS * readers, race = new Race({ lanes: Object.keys(steps), batch_size: readers, reference: "regular" });
    for (const [name, { tokens: each, ms }] of Object.entries(steps)) {
      const rounds = Array.from({ length: Math.ceil(tokens / each) }, (_, i) => {
        const written = Math.min(each, tokens - i * each);
        return { round: i + 1, kind: "plain", time_ms: (i + written / each) * ms, draft_ms: null, verify_ms: null, rows: [{ sequence: 0, start: 0, written, drafted: [] }] };
      });
      race.add({ [name]: { rounds, new: {} } });
    }
    return race;
  }

  phase(phase) {
    this.slider.disabled = busy(phase);
    if (!over(phase)) return;
    this.raced();
    // The curve may have moved the slider meanwhile.
    if (this.shows) this.draw();
    else this.home();
  }

  /** Add the visitor's own race to the measured speed-ups of this machine. */
  raced() {
    const { here } = this.known.machines, { head, view } = run() ?? {}, speed = view?.lanes.bass?.metrics.speedup;
    if (!here || !speed || !view.done || head.clock || tape.state.recorded || head.batch_size > this.known.readers.at(-1)) return;
    this.own = [head.batch_size, speed];
  }

  /** The steps with this many readers: {lane: {tokens, ms, speed}}. `speed` is relative to Regular. */
  steps(readers) {
    const { regular, bass } = this.machine, by = bass[this.chosen("text")], at = this.known.readers.indexOf(readers);
    const pace = readers / regular[at];
    const step = (tokens, ms) => ({ tokens, ms, speed: tokens / ms / pace });
    return { regular: step(readers, regular[at]), speculative: step(...by[0]), bass: step(...by[at]) };
  }

  /** The last number of readers at which BASS pays, or 0. */
  get last() {
    const counts = this.known.readers, stops = counts.findIndex((readers) => this.steps(readers).bass.speed < PAYS);
    return stops < 0 ? counts.at(-1) : counts[stops - 1] ?? 0;
  }

  /** `shown` is the number of readers next to the slider. */
  draw(shown = Number(this.slider.value)) {
    const readers = Number(this.slider.value), { last } = this;
    this.slider.setAttribute("aria-valuetext", this.counted(shown));
    setText(this.counter, `${shown}`);
    this.say(readers, this.steps(readers), last);
    this.curve(readers, last);
    const { machine, known } = this, text = known.texts[this.chosen("text")];
    setText(this.root.querySelector(".readers-source"),
      `Predicted with ${known.drafts} drafts per row. Step times: ${machine.source}. Acceptance: ${text.source}.`
      + (this.measured.length ? ` ${this.machine === this.known.machines.here ? "Ring: your last race, measured." : "Rings: measured speed-ups of BASS."}` : ""));
  }

  counted(readers) {
    return `${readers} reader${readers === 1 ? "" : "s"}`;
  }

  say(readers, { bass }, last) {
    const most = this.known.readers.at(-1);
    const line = this.root.querySelector(".readers-said"), speed = `${number(bass.speed, 2)}×`;
    const pays = last === most ? `BASS still pays at ${most}.` : last ? `BASS stops paying after ${last}.` : "BASS does not pay here.";
    const strong = make("strong", "", speed);
    if (line.dataset.said === `${readers}${speed}${pays}`) return;
    line.dataset.said = `${readers}${speed}${pays}`;
    line.replaceChildren(`${this.counted(readers)}: BASS is `, strong, ` as fast as Regular. ${pays}`);
  }

  /** [readers, speed-up] of BASS, as measured. */
  get measured() {
    const own = this.own && this.machine === this.known.machines.here ? [this.own] : [];
    return [...own, ...Object.entries(this.machine.measured?.[this.chosen("text")] ?? {}).map(([readers, speed]) => [Number(readers), speed])];
  }

  curve(readers, last) {
    const { width, height, left, right, top, bottom } = CURVE, counts = this.known.readers;
    const all = counts.map((count) => this.steps(count)), high = Math.max(2, ...all.map(({ bass }) => bass.speed), ...this.measured.map(([, speed]) => speed));
    const x = (count) => left + (width - left - right) * (count - counts[0]) / (counts.at(-1) - counts[0]);
    const y = (speed) => height - bottom - (height - top - bottom) * speed / (high * 1.05);
    const parts = [];
    const add = (tag, attributes, text) => parts.push(svg(tag, attributes, text));
    if (last < counts.at(-1)) {
      const from = x(last + 0.5);
      add("rect", { class: "behind", x: from, y: top, width: width - right - from, height: height - top - bottom });
      if (width - right - from > 100) add("text", { class: "note", x: from + 8, y: top + 14 }, "does not pay");
    }
    for (let speed = 0; speed <= high; speed += 1) {
      add("line", { class: speed === 1 ? "regular" : "grid", x1: left, x2: width - right, y1: y(speed), y2: y(speed) });
      add("text", { class: "tick", x: left - 8, y: y(speed) + 4, "text-anchor": "end" }, `${speed}×`);
    }
    for (const count of counts) {
      if (count === 1 || count % 4 === 0) add("text", { class: "tick", x: x(count), y: height - 6, "text-anchor": "middle" }, count);
    }
    add("line", { class: "now", x1: x(readers), x2: x(readers), y1: top, y2: height - bottom });
    for (const lane of LINES) {
      const points = all.map((steps, i) => `${x(counts[i])},${y(steps[lane].speed)}`).join(" ");
      add("polyline", { class: `of-${lane}`, points });
      add("circle", { class: `of-${lane}`, cx: x(readers), cy: y(this.steps(readers)[lane].speed), r: 6 });
    }
    for (const [count, speed] of this.measured) add("circle", { class: "measured", cx: x(count), cy: y(speed), r: 5 });
    const end = all.at(-1);
    add("text", { class: "name of-bass", x: width - right, y: y(end.bass.speed) - 12, "text-anchor": "end" }, "BASS");
    add("text", { class: "name", x: x(12), y: y(1) + 16, "text-anchor": "middle" }, "Regular");
    add("text", { class: "name of-speculative", x: width - right, y: y(end.speculative.speed) - 10, "text-anchor": "end" }, "Speculative");
    const picture = this.root.querySelector(".readers-curve svg");
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.replaceChildren(...parts);
  }

  /** Move the slider to the pressed place of the curve, and along with the pointer. */
  point(event) {
    const picture = event.currentTarget, { left, right, width } = CURVE, counts = this.known.readers;
    const go = ({ clientX }) => {
      const box = picture.getBoundingClientRect(), at = (clientX - box.left) / box.width * width;
      this.slider.value = Math.round(counts[0] + (counts.at(-1) - counts[0]) * (at - left) / (width - left - right));
      this.predict();
    };
    picture.setPointerCapture(event.pointerId);
    picture.addEventListener("pointermove", go);
    picture.addEventListener("lostpointercapture", () => picture.removeEventListener("pointermove", go), { once: true });
    go(event);
  }
}

export const mountReaders = (element) => new Readers(element.querySelector(".readers"));
