/* A step of "How it works". Contract: `mountStep` reads the step's sliders and lists, and calls `draw` at every change,
   at every new width and once at first; draw(step) draws with the step's `picture`, and says what there is to say. */
(() => {
  "use strict";
  const { setText } = window.Bass;
  const SVG = "http://www.w3.org/2000/svg";

  function shape(tag, attributes, words = "") {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (words !== "") element.textContent = words;
    return element;
  }

  /** One picture, in CSS pixels, as wide as its place. */
  class Picture {
    constructor(place) {
      this.place = place;
      this.svg = shape("svg", { role: "img" });
      place.append(this.svg);
    }

    get width() {
      return Math.max(260, Math.min(this.place.clientWidth || 480, 640));
    }

    /** Begin anew; title: what a screen reader says. */
    clear(height, title) {
      this.svg.replaceChildren();
      this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
      this.svg.setAttribute("aria-label", title);
      this.svg.style.maxWidth = `${this.width}px`;
    }

    rect(x, y, width, height, kind, about = "") {
      const box = shape("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height), rx: 2, class: kind });
      if (about) box.append(shape("title", {}, about));
      this.svg.append(box);
    }

    text(x, y, words, kind = "", anchor = "start") {
      this.svg.append(shape("text", { x, y, class: kind, "text-anchor": anchor }, words));
    }

    line(points, kind) {
      this.svg.append(shape("path", { d: "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L"), class: kind }));
    }

    dot(x, y, kind) {
      this.svg.append(shape("circle", { cx: x, cy: y, r: 6, class: kind }));
    }
  }

  class Step {
    constructor(root, name, draw) {
      this.root = root.querySelector(`[data-step-name=${name}]`);
      this.inputs = [...this.root.querySelectorAll(".walk-controls :is([data-slider], select)")];
      this.pictures = [...this.root.querySelectorAll(".walk-play .picture")].map((place) => new Picture(place));
      this.draw = () => {
        this.label();
        draw(this);
      };
      for (const input of this.inputs) input.addEventListener("input", this.draw);
      let width = 0;
      new ResizeObserver(() => {
        if (!this.pictures.length || this.pictures[0].width === width) return;
        width = this.pictures[0].width;
        this.draw();
      }).observe(this.root);
      this.draw();
    }

    get picture() {
      return this.pictures[0];
    }

    /** The value of each slider, and of each list its chosen option's data, as numbers. */
    get values() {
      return Object.assign({}, ...this.inputs.map((input) => {
        if (input.tagName !== "SELECT") return { [input.dataset.slider]: Number(input.value) };
        return Object.fromEntries(Object.entries(input.selectedOptions[0].dataset).map(([key, value]) => [key, Number(value)]));
      }));
    }

    label() {
      for (const input of this.inputs) {
        const output = input.closest("label").querySelector("output");
        if (output) setText(output, input.value);
      }
    }

    say(words) {
      setText(this.root.querySelector(".walk-said"), words);
    }

    answer(words) {
      setText(this.root.querySelector(".exercise-answer"), words);
    }
  }

  window.Bass.mountStep = (root, name, draw) => new Step(root, name, draw);
})();
