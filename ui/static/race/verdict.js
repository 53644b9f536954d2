/* The verdict above the lanes. Contract: shows the view's sentences (ui/race/verdict.py), at most once a second while
   the race runs, and at its end; only then are they announced. */
(() => {
  "use strict";
  const { on, run, setText, make } = window.Bass;
  const EVERY_MS = 1000;

  class Shown {
    constructor(element) {
      this.element = element;
      this.head = element.querySelector(".verdict-head");
      this.list = element.querySelector("ul");
      on("start", () => this.clear());
      on("view", (view) => this.take(view));
      on("phase", (phase) => ["stopped", "error"].includes(phase) && this.show(run()?.view));
    }

    clear() {
      this.element.hidden = true;
      this.last = -Infinity;
      this.head.setAttribute("aria-live", "off");
    }

    take(view) {
      if (!view.done && performance.now() - this.last < EVERY_MS) return;
      if (view.done) this.head.setAttribute("aria-live", "polite");
      this.show(view);
    }

    show(view) {
      if (!view?.verdict?.head) return;
      this.last = performance.now();
      this.element.hidden = false;
      setText(this.head, view.verdict.head);
      const lines = Object.values(view.verdict.lanes);
      while (this.list.childElementCount > lines.length) this.list.lastElementChild.remove();
      while (this.list.childElementCount < lines.length) this.list.append(make("li"));
      lines.forEach((line, i) => setText(this.list.children[i], line));
    }
  }

  window.Bass.mountVerdict = (root) => new Shown(root.querySelector(".verdict"));
})();
