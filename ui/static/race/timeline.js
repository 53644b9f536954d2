/* Draws when a lane's draft and target were busy, and where the draft rolled back, for lanes whose draft works beside
   their target. Contract: shows the newest WINDOW_MS of the lane's clock, from the lane's own spans, unsmoothed. */
(() => {
  "use strict";
  const { make, number, setText } = window.Bass;
  const WINDOW_MS = 1500, ROWS = ["target", "draft"], NS = "http://www.w3.org/2000/svg";

  function shape(kind, attributes, className) {
    const element = document.createElementNS(NS, kind);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.setAttribute("class", className);
    return element;
  }

  /** The figure of a lane's section, made when it is first needed. */
  function figureOf(section) {
    const found = section.querySelector(".timeline");
    if (found) return found;
    const figure = make("figure", "timeline");
    figure.append(shape("svg", { viewBox: "0 0 1000 44", preserveAspectRatio: "none", "aria-hidden": "true" }, ""));
    figure.append(make("figcaption"));
    section.querySelector(".state").after(figure);
    return figure;
  }

  /** Draw a lane's timeline {target, draft, rollbacks, ...}; without one, remove the figure. */
  function timeline(section, value, clockMs) {
    if (!value) {
      section.querySelector(".timeline")?.remove();
      return;
    }
    const figure = figureOf(section), svg = figure.querySelector("svg");
    const from = Math.max(0, clockMs - WINDOW_MS), x = (ms) => 1000 * (ms - from) / WINDOW_MS;
    const shapes = ROWS.flatMap((row, i) => value[row].filter(([, end]) => end > from).map(([begin, end]) =>
      shape("rect", { x: x(Math.max(begin, from)), y: 2 + 22 * i, width: x(end) - x(Math.max(begin, from)), height: 18 },
        row)));
    const marks = value.rollbacks.filter((at) => at > from).map((at) =>
      shape("line", { x1: x(at), x2: x(at), y1: 22, y2: 44 }, "rollback"));
    svg.replaceChildren(...shapes, ...marks);
    const busy = (ms) => number(clockMs > 0 ? 100 * ms / clockMs : null, 0, " %");
    setText(figure.querySelector("figcaption"), value.note ??
      `The newest ${WINDOW_MS / 1000} s. So far: target (above) busy ${busy(value.target_busy_ms)}, draft (below) ` +
      `${busy(value.draft_busy_ms)}; ${value.rolled_back} roll-backs (red lines), ${value.thrown_away} drafts thrown away`);
  }

  window.Bass.timeline = timeline;
})();
