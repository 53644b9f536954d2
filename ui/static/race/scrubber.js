/* The slider over a run's time. Contract: shown once there is something to go back to; dragging it, or its arrow keys,
   shows an instant of the run on the whole page (tape.js), one drawing a frame. While the race is followed, it moves
   along. It rests while the stepper holds the page. */
(() => {
  "use strict";
  const { on, soon, number, setText, tape } = window.Bass;
  const PAGE_MS = 1000;
  const seconds = (ms) => number(ms / 1000, 1, " s");

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
      let low = 0, high = tape.state.count - 1;
      while (low < high) {
        const middle = (low + high + 1) >> 1;
        if (tape.elapsed(middle) <= ms + 1e-6) low = middle;
        else high = middle - 1;
      }
      return low;
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
      // The slider stays in sight while another instant than the newest is shown.
      this.element.closest("#scrubber").classList.toggle("away", (away || Boolean(recorded)) && !(last && !playing));
    }
  }

  window.Bass.mountScrubber = (element) => new Scrubber(element.querySelector(".scrubber"));
})();
