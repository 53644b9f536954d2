/* For phones, where one lane fills the screen: scrolls to the lanes when a race starts, and shows the figures of all lanes
   at the bottom while some lanes are out of sight. The figures are copied from the lanes. A tap on one shows its lane. */
(() => {
  "use strict";
  const { on, soon, run, setText, make, laneName, lookOf, wear } = window.Bass;
  const PHONE = window.matchMedia("(max-width: 700px)");
  const STACKED = window.matchMedia("(max-width: 900px)");
  const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");
  const FIGURES = ["speedup", "ms_per_token"];

  class Glance {
    constructor(root) {
      this.root = root;
      this.bar = root.querySelector(".glance");
      this.list = this.bar.querySelector("ul");
      this.seen = new Map();
      this.draw = this.draw.bind(this);
      this.watch = new IntersectionObserver((entries) => {
        for (const { target, isIntersecting } of entries) this.seen.set(target, isIntersecting);
        this.draw();
      });
      this.watchRun();
      on("adopted", () => this.watchRun());
      this.bar.querySelector(".glance-stop").addEventListener("click", () => document.querySelector("#stop").click());
      on("start", (head) => this.start(head));
      on("view", () => soon(this.draw));
      // The opening needs the room.
      on("scene", (scene) => {
        this.opening = scene !== null;
        soon(this.draw);
      });
      on("phase", (phase) => {
        this.bar.classList.toggle("racing", phase === "running");
        soon(this.draw);
      });
      PHONE.addEventListener("change", this.draw);
    }

    /** Hide the bar while Run is in the lower third of the screen, so that the bar does not cover Run. */
    watchRun() {
      const start = document.querySelector("#run");
      if (!start) return;
      new IntersectionObserver((entries) => {
        this.overRun = entries.at(-1).isIntersecting;
        this.draw();
      }, { rootMargin: "-65% 0px 0px 0px" }).observe(start);
    }

    lane(name) {
      return this.root.querySelector(`[id="lane-${name}"]`);
    }

    start({ lanes }) {
      this.watch.disconnect();
      this.seen.clear();
      this.list.replaceChildren(...lanes.map((name) => {
        const item = make("li"), button = make("button", "glance-lane");
        button.type = "button";
        button.dataset.glance = name;
        button.dataset.predicted = "word";
        button.style.setProperty("--lane", `var(--${lookOf(name).colour})`);
        button.append(make("span", "glance-name", laneName(name)), make("span", "glance-speedup", "–"), make("span", "glance-ms"));
        button.addEventListener("click", () => this.show(this.lane(name)));
        item.append(button);
        return item;
      }));
      for (const name of lanes) this.watch.observe(this.lane(name).querySelector(".figures"));
      // On a phone the lanes are below the settings, so they may be out of sight.
      const top = this.root.querySelector(".lane-grid").getBoundingClientRect().top;
      if (STACKED.matches && !window.Bass.tape.state.recorded && (top < 0 || top > 0.6 * window.innerHeight)) this.show(this.root);
    }

    show(element) {
      element.scrollIntoView({ behavior: STILL.matches ? "auto" : "smooth", block: "start" });
    }

    draw() {
      const known = [...this.seen.values()];
      this.bar.hidden = !run() || !PHONE.matches || Boolean(this.overRun) || Boolean(this.opening) || known.every((seen) => seen);
      if (this.bar.hidden) return;
      for (const button of this.list.querySelectorAll("[data-glance]")) {
        const figures = this.lane(button.dataset.glance);
        const [speedup, ms] = FIGURES.map((key) => figures.querySelector(`[data-figure="${key}"]`).textContent);
        setText(button.querySelector(".glance-ms"), `${ms} ms`);
        setText(button.querySelector(".glance-speedup"), speedup);
        button.setAttribute("aria-label", `${laneName(button.dataset.glance)}: ${wear(`${speedup} the speed of Regular, ${ms} ms per token`)}; show this lane`);
      }
    }
  }

  window.Bass.mountGlance = (root) => new Glance(root);
})();
