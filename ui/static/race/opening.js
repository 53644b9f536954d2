/* The opening: three scenes in slow motion that explain the page, until the visitor does something.
   - A scene is a recording, played as slowly as its sentences (narrate.js) can be read. The last scene compares the texts of
     the recording before it, token for token, and then names the machine.
   - It loops while it is in sight. Skip, Escape, a race, or a touch of the axis ends it. It never begins over a race.
   - The event scene has the index of the scene, and null at the end. The event opening has whether it is
     under way, also while it waits out of sight: meanwhile the page's other parts wait.
   - scenes is {names, show(i), skip()} while the page offers its recordings, else null. */
import { on, tell, make, busy, bisect, overlaid } from "bass/page/page.js";
import { tape } from "bass/race/tape.js";
import { EPSILON } from "bass/race/times.js";
import { markEqual } from "bass/race/lanes.js";
import { machineOf, narrator, readingTime } from "bass/race/narrate.js";
import { sentences, say } from "bass/race/said.js";

const TICK_MS = 50;
// How long a scene's end stands after its last sentence was read, and how long the texts are compared.
const HOLD_MS = 500, COMPARE_MS = 4500;
// The highest speed, and the one once the narrator has ended.
const SLOW = 0.1, TAIL = 0.2;
const SCENES = [{ name: "one", title: "One reader" }, { name: "win", title: "Four readers" }, { name: "win", title: "The same text", compares: true }];

/** The speed at which there is time to read the sentence at `ms` until the next one. */
function pace(ms, race) {
  const told = sentences().filter(({ first }) => first), next = bisect(told.length, (i) => told[i].ms <= ms + EPSILON), now = told[next - 1];
  const most = ms > (narrator(race)?.clock ?? Infinity) ? TAIL : SLOW;
  return now ? Math.min(most, ((told[next]?.ms ?? race.end) - now.ms) / readingTime(now.text)) : most;
}

export class Opening {
  /** `load(name)` puts a recording on the tape and returns whether it may be played. */
  constructor(part, load) {
    Object.assign(this, { part, load, at: 0, plays: false, timer: null, since: 0, shown: true });
    this.dots = SCENES.map(({ title }, i) => {
      const dot = make("button");
      Object.assign(dot, { type: "button", title });
      dot.setAttribute("aria-label", `Scene ${i + 1}: ${title}`);
      dot.addEventListener("click", () => this.show(i));
      return dot;
    });
    part.querySelector(".opening-scenes").append(...this.dots);
    part.querySelector("[data-skip]").addEventListener("click", () => this.skip());
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.plays || event.defaultPrevented || overlaid()) return;
      event.preventDefault();
      this.skip();
    });
    on("phase", (phase) => busy(phase) && this.stop());
    on("touched", () => this.stop());
    new IntersectionObserver((entries) => (this.shown = entries.at(-1).isIntersecting)).observe(part.closest(".bass-lanes").querySelector(".axis"));
  }

  /** Play from this scene on. */
  async show(i) {
    const { name, compares } = SCENES[i], race = Symbol("race");
    this.showing = race;
    this.leave();
    const loaded = compares && tape.state.recorded?.name === name || await this.load(name);
    if (this.showing !== race) return;
    if (!loaded) return void this.stop();
    Object.assign(this, { at: i, since: 0, plays: true });
    this.part.hidden = false;
    tell("opening", true);
    tell("scene", i);
    this.dots.forEach((dot, at) => dot.setAttribute("aria-pressed", String(at === i)));
    if (compares) tape.live();
    else {
      tape.speed = pace(0, tape.race);
      tape.play();
    }
    this.ticked = performance.now();
    this.timer = setInterval(() => this.tick(), TICK_MS);
  }

  /** Follow the scene's sentences, and go to the next scene once this one has been read. */
  tick() {
    const { compares } = SCENES[this.at], { state, race } = tape, now = performance.now();
    const passed = Math.min(1000, now - this.ticked), seen = this.shown && !document.hidden;
    this.ticked = now;
    if (!compares && state.ms < state.end) {
      if (!seen) tape.pause();
      else if (!state.playing) tape.play();
      tape.speed = pace(state.ms, race);
      return;
    }
    if (!seen) return;
    this.since += passed;
    const last = compares ? this.compare(this.since) : sentences().at(-1)?.text ?? "";
    if (this.since < (compares ? COMPARE_MS : 0) + readingTime(last) + HOLD_MS) return;
    // The charts may load between two loops.
    if (this.at === SCENES.length - 1) tell("opening", false);
    this.show((this.at + 1) % SCENES.length);
  }

  /** Mark the tokens that all lanes wrote alike, for COMPARE_MS, then name the machine. Returns the last sentence. */
  compare(since) {
    const lanes = [...tape.race.lanes.values()], ids = lanes.map(({ rows }) => rows.map((row) => row.ids));
    const longest = Math.max(...ids[0].map((row) => row.length)), upTo = Math.round(Math.min(1, 2 * since / COMPARE_MS) * longest);
    let same = 0, all = 0;
    const equal = ids[0].map((row, r) => {
      const count = row.slice(0, upTo).findIndex((id, i) => ids.some((lane) => lane[r][i] !== id));
      all += row.length;
      same += count < 0 ? Math.min(upTo, row.length) : count;
      return count < 0 ? upTo : count;
    });
    markEqual(equal);
    const runs = document.querySelector("[data-replay]") ? "" : ": press Run", machine = `Recorded on ${machineOf(tape.state.recorded)}. Yours may differ${runs}.`;
    if (upTo === longest) say(since < COMPARE_MS ? `${same} of ${all} tokens are the same. Guessing changes nothing but the speed.` : machine);
    return machine;
  }

  leave() {
    clearInterval(this.timer);
    markEqual(null);
  }

  /** End the opening where it is. */
  stop() {
    this.showing = null;
    this.leave();
    tell("opening", false);
    if (!this.plays) return;
    this.plays = false;
    this.part.hidden = true;
    tape.speed = SLOW;
    tell("scene", null);
  }

  /** End the opening, and show the end of the race of four readers. */
  async skip() {
    this.stop();
    if (await this.load("win")) tape.live();
  }
}

export const openingScenes = SCENES.map(({ name, title }) => ({ name, title }));
