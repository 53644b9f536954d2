/* Walks through a lane's rounds step by step. Contract: while the panel is open, the page holds what it shows, and the
   race goes on behind it; closing it shows at once what came. Next first completes an animation, then goes on. The
   events bass:pause, bass:step and bass:back on the document do what the panel's buttons do. */
(() => {
  "use strict";
  const { on, hold, next, run, setText, roundsIn, offerLanes, offerRows, drawStep } = window.Bass;

  class Stepper {
    constructor(root) {
      this.root = root;
      this.panel = root.querySelector(".step-part");
      this.button = root.querySelector('[data-switch="stepping"]');
      this.pick = Object.fromEntries([...this.panel.querySelectorAll("[data-walk]")].map((e) => [e.dataset.walk, e]));
      this.at = 0;
      this.until = 0;
      this.still = window.matchMedia("(prefers-reduced-motion: reduce)");
      this.button.addEventListener("click", () => this.show(this.button.getAttribute("aria-pressed") === "true"));
      for (const name of ["lane", "sequence"]) this.pick[name].addEventListener("change", () => this.go(this.first()));
      for (const button of this.panel.querySelectorAll("[data-go]")) {
        button.addEventListener("click", () => this.walk(Number(button.dataset.go)));
      }
      this.drafted = this.panel.querySelector("[data-drafted]");
      this.panel.querySelector("[data-close]").addEventListener("click", () => this.toggle());
      document.addEventListener("keydown", (event) => this.key(event));
      document.addEventListener("bass:pause", () => this.toggle());
      document.addEventListener("bass:step", () => this.walk(1));
      document.addEventListener("bass:back", () => this.walk(-1));
      // A run that was held back from its start begins while the panel is open.
      on("start", () => this.open && this.fill());
      on("phase", (phase) => this.open && phase === "waiting" && this.toggle());
    }

    get open() {
      return !this.panel.hidden;
    }

    toggle() {
      this.button.click();
      if (!this.open) this.button.focus({ preventScroll: true });
    }

    show(open) {
      this.panel.hidden = !open;
      hold(open);
      this.mark(null);
      if (!open) return;
      this.fill();
      this.go(run()?.done ? this.first() : this.steps().length - 1);
    }

    /** Offer the run's lanes and sequences. */
    fill() {
      const lanes = [...(run()?.lanes.values() ?? [])];
      const drafting = lanes.filter((lane) => lane.sequences.some(({ steps }) => steps.some((step) => step.drafts.length)));
      const chosen = (lanes.find(({ name }) => name === this.pick.lane.value) ?? drafting.at(-1) ?? lanes.at(-1))?.name;
      offerLanes(this.pick.lane, lanes.map(({ name }) => name));
      this.pick.lane.value = chosen ?? "";
      offerRows(this.pick.sequence, lanes[0]?.sequences.length ?? 0);
    }

    get sequence() {
      return run()?.lanes.get(this.pick.lane.value)?.sequences[Number(this.pick.sequence.value)];
    }

    /** The rounds of the chosen sequence, without its prefill. */
    steps() {
      return roundsIn(this.sequence);
    }

    /** The first round with a draft. */
    first() {
      return Math.max(0, this.steps().findIndex((step) => step.drafts.length));
    }

    /** The nearest round before or after this one that is to be shown; -1 if there is none. */
    near(by) {
      const steps = this.steps(), any = !this.drafted.checked || !steps.some((step) => step.drafts.length);
      let at = this.at + by;
      while (steps[at] && !any && !steps[at].drafts.length) at += by;
      return steps[at] ? at : -1;
    }

    /** One round on or back; on completes an animation first. */
    walk(by) {
      if (!this.open) return this.toggle();
      if (by > 0 && performance.now() < this.until) return this.finish();
      // What is held back may bring the next round.
      while (by > 0 && this.near(by) < 0 && next());
      const at = this.near(by);
      if (at >= 0) this.go(at);
      else setText(this.panel.querySelector(".step-line"), `${this.place()}: there is no ${by > 0 ? "later" : "earlier"} round${this.drafted.checked ? " with drafts" : ""}${by > 0 && !run()?.done ? " yet" : ""}.`);
    }

    finish() {
      this.until = 0;
      this.panel.classList.add("at-end");
    }

    place() {
      const steps = this.steps(), step = steps[this.at];
      return step ? `Round ${this.at + 1} of ${steps.length}${run().done ? "" : " so far"}` : "No round yet";
    }

    go(at) {
      const steps = this.steps();
      this.at = Math.max(0, Math.min(at, steps.length - 1));
      const step = steps[this.at];
      this.panel.classList.toggle("empty", !step);
      this.panel.classList.remove("at-end");
      this.until = 0;
      this.mark(step);
      if (!step) return setText(this.panel.querySelector(".step-line"), "No round yet: press Run.");
      const ms = drawStep(this.panel, step, this.sequence), count = step.drafts.length;
      this.until = this.still.matches ? 0 : performance.now() + ms;
      const drafts = `${count} ${count === 1 ? "draft" : "drafts"}, ${step.accepted} accepted`;
      setText(this.panel.querySelector(".step-line"), `${this.place()}: ${count ? drafts : "nothing drafted"}.`);
    }

    /** Outline the round's tokens in the lane's text and dim what came later; null undoes it. */
    mark(step) {
      for (const span of this.root.querySelectorAll(".token.stepped, .token.later")) span.classList.remove("stepped", "later");
      if (!step) return;
      const { lane, sequence } = Object.fromEntries(Object.entries(this.pick).map(([name, { value }]) => [name, value]));
      const text = this.root.querySelector(`[id="lane-${lane}"] .sequence[data-sequence="${sequence}"]`);
      const end = step.start + step.written;
      const spans = [...(text?.children ?? [])];
      for (const span of spans) {
        span.classList.toggle("stepped", span.token >= step.start && span.token < end);
        span.classList.toggle("later", span.token >= end);
      }
      const here = spans.find((span) => span.classList.contains("stepped")), box = text?.closest(".window");
      // Scrolls the text alone, never the page.
      if (here) box.scrollTop += here.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2;
    }

    key(event) {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const ours = this.panel.contains(event.target) || event.target === document.body || event.target === this.button;
      if (event.defaultPrevented || !this.open || !by || !ours || event.target.matches("select, input") || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      this.walk(by);
    }
  }

  window.Bass.mountStepper = (root) => new Stepper(root);
})();
