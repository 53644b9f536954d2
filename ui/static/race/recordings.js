/* The recordings that the page offers, and the slider over a run's time.
   - A recording is fetched once, outside the queue of races, and played in the browser. A badge marks the lanes
     as a recording. On a page without models (data-replay), Run plays the first one.
   - Texts from files reach the document only through textContent.
   - The slider appears once there is an earlier instant. Dragging it, or its arrow keys, shows an instant of the run on the
     whole page (tape.js), with one drawing per frame. It moves along with a live race, and is disabled while the
     step-by-step view freezes the page. */
(() => {
  "use strict";
  const { on, tell, soon, setText, make, run, tape, number, bisect, busy, files } = window.Bass;
  const PAGE_MS = 1000;
  const seconds = (ms) => number(ms / 1000, 1, " s");
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
        button.addEventListener("click", () => this.watch(offer));
        return button;
      });
      root.querySelector(".recordings-list").append(...this.buttons);
      this.back.addEventListener("click", () => tape.back());
      for (const kind of ["start", "phase", "instant"]) on(kind, () => this.draw());
      // Gradio's own handler, if there is one, does nothing on such a page.
      if (this.noModels) document.addEventListener("click", (event) => event.target.closest("#run") && this.watch(this.chosen));
      if (offers.length && new URLSearchParams(location.search).get("play") !== "off" && !window.Bass.linked(offers)) this.greet();
      else tell("opening", false);
    }

    /** Play the first recording until a race is started, or show only its end if the visitor prefers reduced motion.
        play=off in the address turns this off. */
    async greet() {
      tell("opening", true);
      await this.watch(this.offers[0], () => !run());
      this.greeted = true;
      this.draw();
      if (window.matchMedia("(prefers-reduced-motion: reduce)").matches) tape.live();
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

    /** Play a recording from its start. */
    async watch(offer, wanted = () => true) {
      this.requested = offer;
      setText(this.about, "");
      try {
        const document = await this.fetch(offer);
        // Another recording, or a race, may have been requested meanwhile.
        if (this.requested !== offer || this.busy || !wanted()) return;
        tape.load(document, offer);
        tape.play();
      } catch {
        this.fetched.delete(offer.name);
        this.note.hidden = false;
        setText(this.about, FAILED);
      }
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
      if (recorded) setText(this.about, [recorded.look_for, `Recorded: ${recorded.about}.`].filter(Boolean).join(" "));
    }
  }

  class Scrubber {
    constructor(element) {
      this.element = element;
      this.at = element.querySelector("input");
      this.time = element.querySelector(".tape-time");
      this.buttons = Object.fromEntries([...element.querySelectorAll("[data-tape]")].map((e) => [e.dataset.tape, e]));
      this.draw = this.draw.bind(this);
      this.go = this.go.bind(this);
      this.wanted = null;
      this.at.addEventListener("input", () => this.want(this.nearest(Number(this.at.value))));
      this.at.addEventListener("keydown", (event) => this.key(event));
      this.buttons.play.addEventListener("click", () => (tape.state.playing ? tape.pause() : tape.play()));
      this.buttons.live.addEventListener("click", () => tape.live());
      for (const kind of ["start", "view", "phase", "instant"]) on(kind, () => soon(this.draw));
    }

    /** The last instant at or before `ms`. */
    nearest(ms) {
      return Math.max(0, bisect(tape.state.count, (i) => tape.elapsed(i) <= ms + 1e-6) - 1);
    }

    want(i) {
      tape.pause();
      this.wanted = i;
      soon(this.go);
    }

    go() {
      if (this.wanted === null) return;
      const i = this.wanted;
      this.wanted = null;
      tape.jump(i);
    }

    key(event) {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const { count, playing } = tape.state, now = this.wanted ?? tape.state.now, ms = tape.elapsed(Math.max(now, 0));
      const to = {
        ArrowLeft: now - 1, ArrowDown: now - 1, ArrowRight: now + 1, ArrowUp: now + 1, Home: 0, End: count - 1,
        PageUp: this.nearest(ms + PAGE_MS), PageDown: this.nearest(ms - PAGE_MS),
      }[event.key];
      if (to !== undefined) this.want(Math.max(0, Math.min(to, count - 1)));
      else if (event.key === " ") (playing ? tape.pause : tape.play)();
      else return;
      event.preventDefault();
    }

    draw() {
      const { count, now, away, playing, recorded, ended, held } = tape.state;
      this.element.hidden = count < 2;
      if (count < 2) return;
      const end = tape.elapsed(count - 1), at = now < 0 ? 0 : tape.elapsed(now), last = now === count - 1;
      this.at.max = end;
      if (this.wanted === null) this.at.value = at;
      for (const control of [this.at, this.buttons.play]) control.disabled = held;
      this.buttons.live.disabled = held || (recorded ? last : !away);
      const followed = !recorded && !away && !ended;
      setText(this.buttons.play, playing ? "Pause" : "Play");
      this.buttons.play.setAttribute("aria-label", playing ? "Pause" : last ? "Play from the start" : "Play from here");
      setText(this.buttons.live, recorded || ended ? "To the end" : "Live");
      const words = followed ? `${seconds(end)}, live` : `${seconds(at)} of ${seconds(end)}`;
      setText(this.time, words);
      this.at.setAttribute("aria-valuetext", words);
      this.element.classList.toggle("away", away || Boolean(recorded));
      // Keep the slider in sight unless the newest instant is shown.
      this.element.closest("#scrubber").classList.toggle("away", (away || Boolean(recorded)) && !(last && !playing));
    }
  }

  window.Bass.mountTape = (element, props, server) => {
    const { offers, known, made } = JSON.parse(props.value);
    Object.assign(files, { known, made });
    new Recordings(element.querySelector(".bass-tape"), offers, server);
  };
  window.Bass.mountScrubber = (element) => new Scrubber(element.querySelector(".scrubber"));
})();
