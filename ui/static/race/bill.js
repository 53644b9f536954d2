/* Draws what a planner reckoned before a round: each draft's worth against the price of its place in the step, and the
   round on the measured curve of costs. Contract: numbers come from the round's bill alone (Bill in
   bass_core/sequence.py); a sentence says the same as the charts. Draws a few times a second at most. */
(() => {
  "use strict";
  const { number, setText, plots, clock } = window.Bass;
  // As in charts.js: drawing gets at most a twentieth of the page's thread.
  const REDRAW_MS = 300, BUSY = 19, LONGEST_MS = 5000;

  /** ms of a step of so many tokens: linear between the curve's points, going on at its end. */
  function costOf(curve, tokens) {
    if (curve.length === 1) return curve[0][1];
    const found = curve.findIndex(([x]) => x >= tokens), i = Math.max(1, found < 0 ? curve.length - 1 : found);
    const [[x0, y0], [x1, y1]] = [curve[i - 1], curve[i]];
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0);
  }

  const plural = (count, one, many = `${one}s`) => `${number(count, 0)} ${count === 1 ? one : many}`;

  function sentence({ rows, drafting, written, bill }, curve) {
    const { worths, prices, tokens, levels, draft_ms: draft, expected, plain_ms: plain } = bill;
    if (!worths.length) {
      const price = prices.length ? `: the first place in the step costs ${number(prices[0], 2)} tokens` : "";
      const asked = levels ? `It took ${plural(levels, "forward")} of the draft to see it.` : "So the draft was not asked.";
      return `A plain step: no draft was worth its price${price}. ${asked}`;
    }
    const ms = costOf(curve, tokens) + draft, who = plural(drafting, "row") + (drafting < rows ? ` out of ${rows}` : "");
    return `${plural(worths.length, "draft")} of ${who} ${worths.length === 1 ? "costs" : "cost"} ${number(ms - plain, 1)} ms ` +
      `more than a plain step and should bring ${number(expected - rows, 1)} tokens more: as much as ` +
      `${number(expected / rows, 2)} plain steps, in the time of ${number(ms / plain, 2)}. ` +
      `The round wrote ${plural(written, "token")}; ${number(expected, 1)} were expected.`;
  }

  function worthTraces({ worths, prices }, own, colour) {
    const rank = (values) => values.map((_, i) => i + 1);
    const pays = worths.map((worth, i) => (i >= prices.length || worth >= prices[i] ? 1 : 0.4));
    return [
      { type: "bar", name: "worth of a draft", x: rank(worths), y: worths, marker: { color: own, opacity: pays },
        hovertemplate: "%{y:.3f} tokens" },
      { type: "scatter", mode: "lines", name: "price of its place", x: rank(prices), y: prices,
        line: { color: colour("ink"), width: 2, shape: "hvh" }, hovertemplate: "%{y:.3f} tokens" },
    ].filter(({ x }) => x.length);
  }

  function costTraces({ tokens, plain_ms: plain }, curve, own, colour) {
    const point = (name, x, y, symbol) => ({
      type: "scatter", mode: "markers", name, x: [x], y: [y], marker: { size: 11, symbol, color: colour("ink"), line: { width: 2 } },
      hovertemplate: "%{x} tokens, %{y:.1f} ms",
    });
    return [
      { type: "scatter", mode: "lines", name: clock() ? "predicted" : "measured", x: curve.map(([x]) => x), y: curve.map(([, y]) => y),
        line: { color: own, width: 2.5 }, hovertemplate: "%{x} tokens, %{y:.1f} ms" },
      point("plain step", curve[0][0], plain, "circle-open"), point("this round", tokens, costOf(curve, tokens), "circle"),
    ];
  }

  class BillChart {
    constructor(element, plotly) {
      this.element = element;
      this.line = element.querySelector(".bill-line");
      this.figures = [...element.querySelectorAll(".plot")];
      this.due = 0;
      plots.load(plotly).then(() => this.plan());
      plots.onTheme(() => this.plan(), () => this.paint());
    }

    /** Show the bill of a lane's round; a round without one hides it. `following`: another one may follow soon. */
    show(lane, round, following) {
      const curve = lane?.curves[round?.bill?.curve];
      this.element.hidden = !curve?.length;
      if (!following) this.due = 0;
      if (this.shown?.round === round) return;
      this.shown = { lane, round, curve };
      if (this.element.hidden) return;
      setText(this.line, (clock() ? "Predicted: " : "") + sentence(round, curve));
      this.plan();
    }

    plan() {
      if (!window.Plotly || !this.shown || this.element.hidden) return;
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.paint(), Math.max(0, this.due - performance.now()));
    }

    paint() {
      if (this.element.hidden || !this.shown || !window.Plotly) return;
      const start = performance.now(), [worth, cost] = this.figures;
      const { lane, round: { bill }, curve } = this.shown;
      const colour = plots.palette(worth), own = plots.lineOf(colour, lane.name).color;
      const places = Math.max(bill.worths.length, bill.prices.length, 1);
      const ranks = { range: [0.4, places + 0.6], tick0: 1, dtick: Math.ceil(places / 12) };
      this.react(worth, colour, worthTraces(bill, own, colour), { text: "drafts of all rows, the best first", ...ranks }, "tokens");
      this.react(cost, colour, costTraces(bill, curve, own, colour), { text: "tokens in the step" }, "ms");
      const end = performance.now();
      this.due = end + Math.max(REDRAW_MS, Math.min(BUSY * (end - start), LONGEST_MS));
    }

    react(plot, colour, traces, { text, ...x }, y) {
      const axis = plots.axis(colour), title = (words) => ({ text: words, standoff: 4, font: { size: 11.5 } });
      plots.react(plot, traces, plots.layout(colour, window.Bass.run().head.run, {
        xaxis: { ...axis, title: title(text), ...x }, yaxis: { ...axis, title: title(y) }, hovermode: "closest",
        bargap: 0.25, margin: { l: 50, r: 10, t: 26, b: 34 },
      }));
    }
  }

  window.Bass.mountBill = (element, plotly) => new BillChart(element, plotly);
})();
