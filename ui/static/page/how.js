/* The what-if plot. Contract: expected speed-up over token acceptance by Leviathan et al. 2211.17192, and the last
   run's measured points on it. Expected tokens of a round at length l: (1 - a^(l+1)) / (1 - a); speed-up: that
   over l c + 1. A common stop for a batch of b has a^b in place of a. */
(() => {
  "use strict";
  const { on, run, number, setText, laneName, plots, clock, formulas: { tokens, speedup } } = window.Bass;
  const POINTS = 101;

  class WhatIf {
    constructor(element, plotly) {
      this.element = element;
      this.plot = element.querySelector(".what-if .plot");
      this.sliders = [...element.querySelectorAll(".what-if [data-slider]")];
      for (const slider of this.sliders) slider.addEventListener("input", () => this.draw());
      on("phase", () => this.draw());
      plots.onTheme(() => this.draw(), () => {
        this.visible = this.plot.checkVisibility();
        this.draw();
      });
      this.visible = false;
      new IntersectionObserver((entries) => {
        this.visible = entries.some((entry) => entry.isIntersecting);
        if (this.visible) plots.load(plotly).then(() => this.draw());
      }).observe(this.plot);
    }

    values() {
      return Object.fromEntries(this.sliders.map((slider) => [slider.dataset.slider, Number(slider.value)]));
    }

    /** The measured points: one for each lane that drafted. */
    measured(colour) {
      return Object.entries(run()?.view?.lanes ?? {})
        .filter(([, { metrics: m }]) => Number.isFinite(m.token_acceptance) && Number.isFinite(m.speedup))
        .map(([name, { metrics: m }]) => ({
          type: "scatter", mode: "markers", name: `${laneName(name)}, ${clock() ? "predicted" : "measured"}`, x: [m.token_acceptance], y: [m.speedup],
          marker: { size: 14, color: plots.lineOf(colour, name).color, line: { width: 2, color: colour("card") } },
          hovertemplate: "a %{x:.2f}, %{y:.2f}×<extra>%{fullData.name}</extra>",
        }));
    }

    draw() {
      const { a, c, l, b } = this.values();
      for (const slider of this.sliders) {
        setText(this.element.querySelector(`.what-if [data-output=${slider.dataset.slider}]`), `${Number(slider.value)}`);
      }
      setText(this.element.querySelector(".what-if-line"),
        `Expected at a = ${a}: ${number(tokens(a, l), 2)} tokens a round, ${number(speedup(a, l, c), 2)}× where each row ` +
        `has its own end; ${number(speedup(a ** b, l, c), 2)}× with one common stop for the batch of ${b}.`);
      if (!this.visible || !window.Plotly) return;
      const colour = plots.palette(this.plot), axis = plots.axis(colour);
      const x = Array.from({ length: POINTS }, (_, i) => i / (POINTS - 1));
      const line = (name, f, look) => ({ type: "scatter", mode: "lines", name, x, y: x.map(f), line: look });
      const own = { color: colour("own-end"), width: 3 }, common = { color: colour("common-stop"), width: 2, dash: "dash" };
      plots.react(this.plot, [
        line("each row with its own end (BASS), expected", (v) => speedup(v, l, c), own),
        line(`one common stop, batch ${b}, expected`, (v) => speedup(v ** b, l, c), common),
        { type: "scatter", mode: "markers", name: "your a", x: [a], y: [speedup(a, l, c)], marker: { size: 9, color: colour("ink"), symbol: "x" } },
        ...this.measured(colour),
      ], plots.layout(colour, "what-if", {
        height: 340, hovermode: "closest", legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11.5 } }, margin: { l: 50, r: 10, t: 60, b: 40 },
        xaxis: { ...axis, range: [0, 1.01], title: { text: "token acceptance a", standoff: 4 } },
        yaxis: { ...axis, ticksuffix: "×", title: { text: "speed-up over regular", standoff: 4 } },
        shapes: [{ type: "line", x0: 0, x1: 1.01, y0: 1, y1: 1, line: { color: colour("soft"), width: 1, dash: "dot" } }],
      }));
    }
  }

  window.Bass.mountHow = (element, plotly) => {
    const root = element.querySelector(".bass-how");
    window.Bass.mountFirstSteps(root);
    window.Bass.mountLastSteps(root);
    return new WhatIf(root, plotly);
  };
})();
