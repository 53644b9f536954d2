/* The figures of the tab "Sweep". Contract: a value is a state {run, phase, message, sweep} of ui/sweep/events.py; points
   that were drawn stay until another sweep brings some. Texts reach the document through textContent alone. */
(() => {
  "use strict";
  const { number, setText, make, plots } = window.Bass;
  const percent = (value) => number(value === null ? null : 100 * value, 0, " %");
  // Two standard errors of a speed-up.
  const bar = (p) => (p.error === null ? "" : ` ± ${number(2 * p.error * p.speedup, 2)}`);
  // A column: its head, its cell for a point, and the figure without which no point has one.
  const COLUMNS = [
    ["batch", (p) => String(p.batch)],
    ["draft length", (p, labels) => (labels.get(p.draft_length) ?? String(p.draft_length)).split(",")[0]],
    ["speed-up", (p) => (p.speedup === null ? "n/a" : `${number(p.speedup, 2)}×${bar(p)}`)],
    ["against regular", (p) => p.against ?? "n/a"],
    ["ms per token", (p) => number(p.ms_per_token, 2)],
    ["of regular", (p) => number(p.regular_ms_per_token, 2)],
    ["tokens a row-round", (p) => number(p.tokens, 2)],
    ["token acceptance", (p) => percent(p.acceptance), "acceptance"],
    ["rounds", (p) => number(p.rounds, 0)],
  ];
  const FIELDS = [
    "batch", "draft_length", "speedup", "error", "against", "ms_per_token", "regular_ms_per_token", "tokens", "acceptance", "rounds",
  ];
  const PHASES = { waiting: "Waiting for the device…", stopped: "Stopped. The points so far are kept.", done: "Done." };

  const seconds = (value) => (value < 90 ? `${number(Math.ceil(value), 0)} s` : `${number(Math.ceil(value / 60), 0)} min`);

  function progressOf({ done, races, left_s: left, now }) {
    return `Point ${done + 1} of ${races}: ${now}. About ${seconds(left)} left.`;
  }

  function asCsv(sweep) {
    const cell = (value) => (value === null || value === undefined ? "" : String(value));
    const rows = sweep.points.map((p) => [sweep.kind, ...FIELDS.map((name) => cell(p[name]))]);
    return `${[["kind", ...FIELDS], ...rows].map((row) => row.join(",")).join("\n")}\n`;
  }

  /** What the points are of, in the chart's caption. */
  function about({ kind, settings, device }) {
    if (kind === "predicted") return `${device}; acceptance ${number(settings.acceptance, 2)}`;
    const rows = settings.prompts === "lines" ? "rows of different prompts" : "sampled rows of one prompt";
    const heat = `temperature ${settings.temperature}${settings.resampled ? ", since at 0 all rows would be alike" : ""}`;
    return `${device ?? "unknown device"}; ${rows}, ${heat}; seed ${settings.seed}`;
  }

  const figures = {};

  /** [acceptance, where it is from]: the last sweep's, best with a fixed length, else the last race's, else null, assumed. */
  function measuredAcceptance() {
    const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
    const known = (figures.measured?.sweep?.points ?? []).filter((p) => p.acceptance !== null);
    // A fixed length drafts at every place, so its acceptance is not that of the places which a policy chose.
    const fixed = known.filter((p) => Number.isInteger(p.draft_length)), swept = fixed.length ? fixed : known;
    if (swept.length) return [mean(swept.map((p) => p.acceptance)), "sweep"];
    const lanes = Object.values(window.Bass.run()?.view?.lanes ?? {}).map(({ metrics }) => metrics.token_acceptance);
    const raced = lanes.filter(Number.isFinite);
    return raced.length ? [raced.at(-1), "race"] : [null, "assumed"];
  }

  /** The values of the button "Predict", with an acceptance where the field is empty. */
  function withAcceptance([fixed, machine, models, acceptance]) {
    const [value, origin] = (acceptance ?? "").trim() === "" ? measuredAcceptance() : [acceptance, "given"];
    return [fixed, machine, models, origin === "given" ? value : value?.toFixed(3) ?? "", origin];
  }

  class Figure {
    constructor(root, plotly) {
      this.root = root;
      this.plotly = plotly;
      this.plot = root.querySelector(".plot");
      this.line = root.querySelector(".sweep-line");
      this.bar = root.querySelector(".sweep-bar");
      this.sweep = null;
      this.run = null;
      this.phase = "ready";
      root.addEventListener("click", (event) => this.take(event.target.closest("[data-take]")?.dataset.take));
      plots.onTheme(() => this.draw());
      // The tab is not laid out until it is opened.
      new IntersectionObserver((entries) => {
        this.visible = entries.some((entry) => entry.isIntersecting);
        if (this.visible) this.draw();
      }).observe(this.plot);
      new ResizeObserver(() => this.plot.clientWidth !== this.width && this.draw()).observe(this.plot);
    }

    /** Say what happens now; `waiting` and `stopped` come from the page's own buttons. */
    show(phase, message = "") {
      this.phase = phase;
      this.line.dataset.phase = phase === "lost" ? "error" : phase;
      setText(this.line, message || PHASES[phase] || "");
      if (phase !== "running") this.bar.hidden = true;
    }

    receive(state) {
      // After Stop, values that the server sent before may still arrive.
      if (this.phase === "stopped" && state.run === this.run) return;
      if (state.phase === "lost" && !["waiting", "running"].includes(this.phase)) return;
      this.run = state.run;
      const { sweep } = state, progress = sweep?.progress;
      this.show(state.phase, state.message || (progress && state.phase === "running" ? progressOf(progress) : ""));
      this.bar.hidden = !(progress && state.phase === "running");
      if (progress) this.bar.value = progress.done / progress.races;
      if (!sweep || (!sweep.points.length && this.sweep)) return;
      this.sweep = sweep;
      this.table();
      this.draw();
    }

    table() {
      const { lines, points, sentences, assumptions } = this.sweep;
      const labels = new Map(lines.map(({ draft_length: length, label }) => [length, label]));
      const row = (cells, head) => {
        const line = make("tr");
        line.append(...cells.map((text, i) => {
          const cell = make(head || i === 0 ? "th" : "td", "", text);
          if (cell.tagName === "TH") cell.scope = head ? "col" : "row";
          return cell;
        }));
        return line;
      };
      const columns = COLUMNS.filter(([, , key]) => !key || points.some((p) => p[key] !== null));
      this.root.querySelector("thead").replaceChildren(row(columns.map(([name]) => name), true));
      this.root.querySelector("tbody").replaceChildren(...points.map((p) => row(columns.map(([, cell]) => cell(p, labels)))));
      this.root.querySelector(".sweep-results").hidden = !points.length;
      const said = this.root.querySelector(".sweep-said");
      if (points.length && [...said.children].map((one) => one.textContent).join() !== sentences.join()) {
        said.replaceChildren(...sentences.map((text) => make("li", "", text)));
      }
      setText(this.root.querySelector(".sweep-of"), about(this.sweep));
      const assumed = this.root.querySelector(".sweep-assumed");
      assumed.hidden = !assumptions;
      assumed.querySelector("ul").replaceChildren(...(assumptions ?? []).map((text) => make("li", "", text)));
    }

    draw() {
      if (!this.visible) return;
      plots.load(this.plotly).then(() => {
        // Plotly would leave the legend at its place in the figure of another width.
        if (this.width && this.width !== this.plot.clientWidth) {
          window.Plotly.purge(this.plot);
          this.plot.emptyAs = null;
        }
        this.width = this.plot.clientWidth;
        const empty = { kind: this.root.dataset.kind, settings: { batches: [1, 2, 4, 8] }, lines: [], points: [], ridge: { tokens: null } };
        window.Bass.sweepChart(this.plot, this.sweep ?? empty);
      });
    }

    take(what) {
      const { download } = window.Bass, name = `bass-sweep-${this.root.dataset.kind}`;
      if (what === "json") download(`${name}.json`, "application/json", JSON.stringify({ sweep: 1, ...this.sweep }, null, 1));
      else if (what === "csv") download(`${name}.csv`, "text/csv", asCsv(this.sweep));
    }
  }

  window.Bass.withAcceptance = withAcceptance;
  window.Bass.mountSweep = (element, props, watch, plotly) => {
    const root = element.querySelector(".bass-sweep"), figure = new Figure(root, plotly), { kind } = root.dataset;
    figures[kind] = figure;
    watch("value", () => props.value && figure.receive(JSON.parse(props.value)));
    document.addEventListener("click", (event) => {
      const start = event.target.closest(kind === "measured" ? "#sweep-measure" : "#sweep-predict");
      const busy = ["waiting", "running"].includes(figure.phase);
      if (start && !start.disabled && !busy) figure.show("waiting");
      if (kind === "measured" && busy && event.target.closest("#sweep-stop")) figure.show("stopped");
    });
  };
})();
