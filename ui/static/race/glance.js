/* For phones: a bar at the bottom. It has the lanes' figures while some lanes are out of sight, and Run (Stop during a race)
   while the form's own button is.
   - The figures are copied from the lanes. A tap on one shows its lane. Run and Stop press the form's buttons.
   - When a race starts, the page scrolls to the lanes. */
import { on, soon, setText, make, busy } from "bass/page/page.js";
import { run, laneName, lookOf } from "bass/race/run.js";
import { wear } from "bass/race/predicted.js";
import { tape } from "bass/race/tape.js";

const PHONE = window.matchMedia("(max-width: 700px)");
const STACKED = window.matchMedia("(max-width: 900px)");
const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");
const FIGURES = ["speedup", "ms_per_token"], WORDS = "speed over Regular, and ms per token";

class Glance {
  constructor(root) {
    this.root = root;
    this.bar = root.querySelector(".glance");
    this.words = this.bar.querySelector("p");
    this.list = this.bar.querySelector("ul");
    this.button = this.bar.querySelector(".glance-run");
    this.seen = new Map();
    this.draw = this.draw.bind(this);
    this.watch = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) this.seen.set(target, isIntersecting);
      this.draw();
    });
    this.button.addEventListener("click", () => document.querySelector(busy(this.phase) ? "#stop" : "#run").click());
    on("start", (head) => this.start(head));
    for (const kind of ["view", "measuring", "form", "adopted"]) on(kind, () => soon(this.draw));
    // The opening needs the room.
    on("scene", (scene) => {
      this.opening = scene !== null;
      soon(this.draw);
    });
    on("phase", (phase) => {
      this.phase = phase;
      soon(this.draw);
    });
    PHONE.addEventListener("change", this.draw);
    const status = document.querySelector("#status-line");
    if (status) new MutationObserver(() => soon(this.draw)).observe(status, { childList: true, subtree: true, characterData: true });
  }

  /** Hide the bar while the form's Run is in the lower third of the screen, so that the bar does not cover it. */
  watchForm() {
    this.form = document.querySelector("#run");
    for (const [name, rootMargin] of [["sees", "0px"], ["covers", "-65% 0px 0px 0px"]]) {
      if (!this.form) break;
      new IntersectionObserver((entries) => {
        this[name] = entries.at(-1).isIntersecting;
        this.draw();
      }, { rootMargin }).observe(this.form);
    }
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
    // The lanes may be out of sight. Asking where they are lays out the page, so ask only for a race.
    if (!STACKED.matches || tape.state.recorded) return;
    const { top } = this.root.querySelector(".lane-grid").getBoundingClientRect();
    if (top < 0 || top > 0.6 * window.innerHeight) this.show(this.root);
  }

  show(element) {
    element.scrollIntoView({ behavior: STILL.matches ? "auto" : "smooth", block: "start" });
  }

  /** What the status line says about a race that waits or was refused. */
  status() {
    if (!["waiting", "error"].includes(this.phase)) return "";
    return [".message", ".place"].map((part) => document.querySelector(`#status-line ${part}`)?.textContent).filter(Boolean).join(" ");
  }

  draw() {
    // The form may be drawn after the lanes. It moves when the stage does (page/ahead.js).
    if (!this.form && !document.querySelector(".ahead")) this.watchForm();
    const figures = Boolean(run()) && !this.opening && [...this.seen.values()].some((seen) => !seen), said = this.status();
    this.button.hidden = !this.form || Boolean(this.sees);
    this.list.hidden = !figures;
    this.bar.hidden = !PHONE.matches || Boolean(this.covers) || !figures && this.button.hidden;
    if (this.bar.hidden) return;
    setText(this.button, busy(this.phase) ? "Stop" : this.form?.textContent.trim() ?? "");
    this.words.hidden = !figures && !said;
    setText(this.words, said || WORDS);
    for (const button of this.list.querySelectorAll("[data-glance]")) {
      const figures = this.lane(button.dataset.glance);
      const [speedup, ms] = FIGURES.map((key) => figures.querySelector(`[data-figure="${key}"]`).textContent);
      setText(button.querySelector(".glance-ms"), `${ms} ms`);
      setText(button.querySelector(".glance-speedup"), speedup);
      button.setAttribute("aria-label", `${laneName(button.dataset.glance)}: ${wear(`${speedup} the speed of Regular, ${ms} ms per token`)}; show this lane`);
    }
  }
}

export const mountGlance = (root) => new Glance(root);
