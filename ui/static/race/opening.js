/* The opening: three scenes in slow motion that explain the page, until the visitor does something.
   - A scene is a recording, its caption (computed from it), and the speed at each moment. The last scene compares the texts
     of the recording before it, token for token.
   - It loops while it is in sight. Skip, Escape, a race, or a touch of the axis ends it. It never begins over a race.
   - The event scene tells the index of the scene, and null at the end.
   - scenes is {names, show(i), skip()} while the page offers its recordings, else null. */
import { on, tell, setText, make, busy, number } from "bass/page/page.js";
import { tape } from "bass/race/tape.js";
import { markEqual } from "bass/race/lanes.js";

const TICK_MS = 50;
// How long a scene's end stands, how long the texts are compared, and how long the result stands.
const HOLD_MS = 1000, COMPARE_MS = 4500, READ_MS = 2000;
// The first drafts appear at FIRST speed, for FIRST_MS of race time. TAIL is the speed once both drafters have ended.
const FIRST = 0.04, FIRST_MS = 60, SLOW = 0.1, TAIL = 0.2;

const ends = (race) => [...race.lanes.values()].map(({ clock }) => clock);
const WORDS = { 2: "twice", 3: "three times", 4: "four times", 5: "five times" };

/** How many times as fast as Regular the other lanes are, on average, in words. */
function about(race) {
  const [regular, ...others] = ends(race), mean = others.reduce((sum, end) => sum + regular / end, 0) / others.length;
  return WORDS[Math.round(mean)] ?? `${number(mean, 1)} times`;
}

const SCENES = [
  {
    name: "one", title: "One reader", caption: (race) => `One reader: both drafters are about ${about(race)} as fast.`,
    speed: (ms, race) => (ms < FIRST_MS ? FIRST : ms < Math.max(...ends(race).slice(1)) + FIRST_MS ? SLOW : TAIL),
  },
  {
    name: "win", title: "Four readers", caption: () => "Four readers: one after another no longer helps, all at once does.",
    speed: () => SLOW,
  },
  { name: "win", title: "The same text", compares: true, caption: () => "The text is the same, token for token" },
];

export class Opening {
  /** `load(name)` puts a recording on the tape and returns whether it may be played. */
  constructor(part, load) {
    Object.assign(this, { part, load, at: 0, plays: false, timer: null, since: 0, shown: true });
    this.caption = part.querySelector(".opening-caption");
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
      // In an open dialog, Escape closes that.
      if (event.key !== "Escape" || !this.plays || event.defaultPrevented || document.querySelector("dialog[open]")) return;
      event.preventDefault();
      this.skip();
    });
    on("phase", (phase) => busy(phase) && this.stop());
    on("touched", () => this.stop());
    new IntersectionObserver((entries) => (this.shown = entries.at(-1).isIntersecting)).observe(part.closest(".bass-lanes").querySelector(".axis"));
    // The page's other parts wait for the end of the opening, or until the visitor looks at them.
    for (const kind of ["wheel", "touchmove", "keydown"]) document.addEventListener(kind, () => this.plays && tell("opening", false), { passive: true });
  }

  /** Play from this scene on. */
  async show(i) {
    const { name, compares, caption } = SCENES[i], race = Symbol("race");
    this.showing = race;
    this.leave();
    if (!(compares && tape.state.recorded?.name === name) && !await this.load(name)) return this.stop();
    if (this.showing !== race) return;
    Object.assign(this, { at: i, since: 0, plays: true });
    this.part.hidden = false;
    tell("scene", i);
    setText(this.caption, caption(tape.race));
    this.dots.forEach((dot, at) => dot.setAttribute("aria-pressed", String(at === i)));
    if (compares) tape.live();
    else {
      tape.speed = SCENES[i].speed(0, tape.race);
      tape.play();
    }
    this.ticked = performance.now();
    this.timer = setInterval(() => this.tick(), TICK_MS);
  }

  /** Follow the scene's speed, and go to the next scene once this one has been read. */
  tick() {
    const { speed, compares } = SCENES[this.at], { state, race } = tape, now = performance.now();
    const passed = Math.min(1000, now - this.ticked), seen = this.shown && !document.hidden;
    this.ticked = now;
    if (!compares && state.ms < state.end) {
      if (!seen) tape.pause();
      else if (!state.playing) tape.play();
      tape.speed = speed(state.ms, race);
      return;
    }
    if (!seen) return;
    this.since += passed;
    if (compares) this.compare(this.since / COMPARE_MS);
    if (this.since < (compares ? COMPARE_MS + READ_MS : HOLD_MS)) return;
    if (this.at === SCENES.length - 1) {
      tell("opening", false);
      // Screen readers have heard all captions once.
      this.caption.setAttribute("aria-live", "off");
    }
    this.show((this.at + 1) % SCENES.length);
  }

  /** Mark the tokens that all lanes wrote alike, up to this share of the texts. */
  compare(share) {
    const lanes = [...tape.race.lanes.values()], ids = lanes.map(({ rows }) => rows.map((row) => row.ids));
    const longest = Math.max(...ids[0].map((row) => row.length)), upTo = Math.round(Math.min(1, share) * longest);
    let same = 0, all = 0;
    const equal = ids[0].map((row, r) => {
      const count = row.slice(0, upTo).findIndex((id, i) => ids.some((lane) => lane[r][i] !== id));
      all += row.length;
      same += count < 0 ? Math.min(upTo, row.length) : count;
      return count < 0 ? upTo : count;
    });
    markEqual(equal);
    setText(this.caption, `${SCENES[this.at].caption()}: ${same} of ${all}.`);
  }

  leave() {
    clearInterval(this.timer);
    markEqual(null);
  }

  /** End the opening where it is. */
  stop() {
    this.showing = null;
    this.leave();
    if (!this.plays) return;
    this.plays = false;
    this.part.hidden = true;
    tell("scene", null);
    tape.speed = SLOW;
    tell("opening", false);
  }

  /** End the opening, and show the end of the race of four readers. */
  async skip() {
    this.stop();
    if (await this.load("win")) tape.live();
  }
}

export const openingScenes = SCENES.map(({ name, title }) => ({ name, title }));
