/* The recordings that the page offers, and the page's opening.
   - A recording is fetched once, outside the queue of races, and played in the browser. A badge marks the lanes
     as a recording. On a page without models (data-replay), Run plays the first one.
   - Texts from files reach the document only through textContent. */
import { on, tell, setText, make, busy } from "bass/page/page.js";
import { run } from "bass/race/run.js";
import { tape } from "bass/race/tape.js";
import { linked } from "bass/page/links.js";
import { files } from "bass/race/files.js";
import { openingScenes, Opening } from "bass/race/opening.js";

export let scenes = null;
const SPEEDS = [0.1, 0.25, 1], LONGEST_MS = 12_000;
const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");
const FAILED = "The recording could not be loaded: try again in a moment.";

class Recordings {
  constructor(root, offers, server) {
    Object.assign(this, { root, offers, server, fetched: new Map() });
    this.part = root.querySelector(".recordings");
    this.note = root.querySelector(".recording-note");
    this.about = root.querySelector(".recording-about");
    this.back = root.querySelector("[data-back]");
    this.noModels = Boolean(document.querySelector("[data-replay]"));
    this.part.hidden = this.noModels && offers.length < 2;
    this.buttons = offers.map((offer) => {
      const button = make("button", "action", offer.title);
      Object.assign(button, { type: "button", title: offer.look_for });
      button.dataset.recording = offer.name;
      button.addEventListener("click", () => {
        tell("touched");
        this.watch(offer);
      });
      return button;
    });
    root.querySelector(".recordings-list").append(...this.buttons);
    this.back.addEventListener("click", () => tape.back());
    for (const kind of ["start", "phase", "instant"]) on(kind, () => this.draw());
    // Gradio's own handler, if there is one, does nothing on such a page.
    if (this.noModels) {
      document.addEventListener("click", (event) => {
        if (!event.target.closest("#run")) return;
        tell("touched");
        this.watch(this.chosen);
      });
    }
    if (offers.length && new URLSearchParams(location.search).get("play") !== "off" && !linked(offers)) this.greet();
    else tell("opening", false);
  }

  /** Play the opening, or the first recording if the page has not those of the opening, until a race is started. With
      reduced motion, show only the first one's end. play=off in the address turns this off. */
  async greet() {
    const needed = openingScenes.map(({ name }) => name), free = () => !run() || Boolean(tape.state.recorded);
    tell("opening", true);
    if (STILL.matches || !needed.every((name) => this.offers.some((offer) => offer.name === name))) {
      await this.watch(this.offers[0], free);
      this.greeted = true;
      return this.draw();
    }
    const load = async (name) => free() && await this.load(this.offers.find((offer) => offer.name === name), free);
    this.opening = new Opening(document.querySelector(".opening"), load);
    scenes = { names: openingScenes.map(({ title }) => title), show: (i) => this.opening.show(i), skip: () => this.opening.skip() };
    await this.opening.show(0);
    // Ahead of the next scene.
    this.fetch(this.offers.find((offer) => offer.name === needed[1])).catch(() => {});
  }

  get chosen() {
    return this.offers.find(({ name }) => name === tape.state.recorded?.name) ?? this.offers[0];
  }

  get busy() {
    return busy(this.phase);
  }

  fetch({ name }) {
    if (!this.fetched.has(name)) this.fetched.set(name, this.server.recording(name));
    return this.fetched.get(name);
  }

  /** Put a recording on the tape. Resolves to whether it is there, and still wanted. */
  async load(offer, wanted = () => true) {
    this.requested = offer;
    setText(this.about, "");
    try {
      const document = await this.fetch(offer);
      // Another recording, or a race, may have been requested meanwhile.
      if (this.requested !== offer || this.busy || !wanted()) return false;
      tape.load(document, offer);
      return true;
    } catch {
      this.fetched.delete(offer.name);
      this.note.hidden = false;
      setText(this.about, FAILED);
      return false;
    }
  }

  /** Play a recording from its start. With reduced motion, show its end. */
  async watch(offer, wanted) {
    if (!await this.load(offer, wanted)) return;
    // The slowest speed at which the race ends soon enough.
    tape.speed = SPEEDS.find((speed) => tape.state.end <= LONGEST_MS * speed) ?? 1;
    if (STILL.matches) tape.live();
    else tape.play();
  }

  draw() {
    // The opening has ended once the recording stops playing.
    if (this.greeted && !tape.state.playing) {
      this.greeted = false;
      tell("opening", false);
    }
    this.phase = document.querySelector("#status-line .message")?.dataset.phase;
    const { recorded, own } = tape.state;
    if (this.busy) this.requested = null;
    for (const button of this.buttons) {
      button.disabled = this.busy;
      button.setAttribute("aria-pressed", String(button.dataset.recording === recorded?.name));
    }
    this.part.classList.toggle("small", Boolean(run()));
    this.note.hidden = !recorded;
    this.back.hidden = !own;
    this.back.disabled = this.busy;
    if (!recorded) return;
    // The note next to the legend names the machine (lanes.js). With models, form.js lists the settings that differ.
    const { look_for: look, made, about } = recorded, { batch_size: rows, settings } = run()?.head ?? {}, heat = settings?.temperature;
    const set = this.noModels && rows ? `Batch ${rows}${Number.isFinite(heat) ? `, temperature ${heat}` : ""}.` : "";
    setText(this.about, [look, made?.date ? `Made on ${made.date}.` : about, set].filter(Boolean).join(" "));
    this.about.title = recorded.about;
  }
}

export const mountTape = (element, props, server) => {
  const { offers, known, made } = JSON.parse(props.value);
  Object.assign(files, { known, made });
  new Recordings(element.querySelector(".bass-tape"), offers, server);
};
