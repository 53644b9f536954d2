/* The visitor's own figures in the tab "Sweep": speed-up by batch size, or for each of the visitor's own prompts.
   - A value is a state {run, phase, message, sweep} of ui/sweep/events.py. Points stay until a new sweep has its first
     points.
   - Lines differ by colour, dash and marker. The error bar of a point is two standard errors. A line at 1 marks regular
     decoding, another one the ridge, if it is known. A band is the 95 % interval over prompts. A missing figure is a gap.
   - Texts reach the document only through textContent. */
import { number, percent, setText, make, tableRow, busy } from "bass/page/page.js";
import { sum, run } from "bass/race/run.js";
import { plots } from "bass/page/plots.js";
import { download } from "bass/race/export.js";

const ERRORS = 2;
const bar = (p) => (p.error === null ? "" : ` ± ${number(ERRORS * p.error * p.speedup, 2)}`);
const promptsOf = (sweep) => sweep.settings.own_prompts ?? [];
// A column: [head, its cell for a point, a figure that at least one point must have if the column is to be shown].
const COLUMNS = [
  ["prompt", (p, labels, prompts) => `${p.prompt}: ${prompts[p.prompt - 1].slice(0, 40)}`, "prompt"],
  ["batch", (p) => String(p.batch)],
  ["draft length", (p, labels) => (labels.get(p.draft_length) ?? String(p.draft_length)).split(",")[0]],
  ["speed-up", (p) => (p.speedup === null ? "n/a" : `${number(p.speedup, 2)}×${bar(p)}`)],
  ["against regular", (p) => p.against ?? "n/a"],
  ["ms per token", (p) => number(p.ms_per_token, 2)],
  ["of regular", (p) => number(p.regular_ms_per_token, 2)],
  ["tokens per row-round", (p) => number(p.tokens, 2)],
  ["token acceptance", (p) => percent(p.acceptance), "acceptance"],
  ["rounds", (p) => number(p.rounds, 0)],
];
const FIELDS = [
  "batch", "draft_length", "speedup", "error", "against", "ms_per_token", "regular_ms_per_token", "tokens", "acceptance", "rounds",
  "prompt",
];
const PHASES = { waiting: "Waiting for the device…", done: "Done." };
const KEPT = "Stopped. The points so far are kept.", OLDER = "Stopped before its first point. The points are those of the sweep before.";

const seconds = (value) => (value < 90 ? `${number(Math.ceil(value), 0)} s` : `${number(Math.ceil(value / 60), 0)} min`);

function progressOf({ done, races, left_s: left, now }) {
  return `Part ${done + 1} of ${races}: ${now}. About ${seconds(left)} left.`;
}

function asCsv(sweep) {
  const cell = (value) => (value === null || value === undefined ? "" : String(value));
  const rows = sweep.points.map((p) => [sweep.kind, ...FIELDS.map((name) => cell(p[name]))]);
  return `${[["kind", ...FIELDS], ...rows].map((row) => row.join(",")).join("\n")}\n`;
}

/** The chart's caption: the machine and the settings of the points. */
function about({ kind, settings, device }) {
  if (kind === "predicted") return `${device}; acceptance ${number(settings.acceptance, 2)}`;
  const sampled = settings.own_prompts.length ? `batch ${settings.batches[0]}, sampled rows of each prompt` : "sampled rows of one prompt";
  const rows = settings.prompts === "lines" ? "rows of different prompts" : sampled;
  const heat = `temperature ${settings.temperature}${settings.resampled ? ", because at 0 all rows would be equal" : ""}`;
  return `${device ?? "unknown device"}; ${rows}, ${heat}; seed ${settings.seed}`;
}

// The looks of the chart's lines, in the order of the lines.
const LOOKS = [
  { colour: "sweep-1", dash: "solid", symbol: "circle" }, { colour: "sweep-2", dash: "dash", symbol: "square" },
  { colour: "sweep-3", dash: "dot", symbol: "diamond" },
];
// Points of one batch are this far apart, in doublings of the batch, so that their error bars don't overlap.
const APART = 0.05;
const lookOf = (i) => LOOKS[i % LOOKS.length];
const log2 = Math.log2;

/** The text of a point's hover box. */
const hover = (p) => `${p.prompt === null ? "" : `prompt ${p.prompt}, `}batch ${p.batch}: ${number(p.speedup, 2)}×${bar(p)}<br>${number(p.ms_per_token, 2)} against ` +
  `${number(p.regular_ms_per_token, 2)} ms per token`;

function trace(colour, line, i, count, points) {
  const look = lookOf(i), own = points.filter((point) => point.draft_length === line.draft_length && point.speedup !== null);
  const shade = colour(look.colour);
  return {
    type: "scatter", mode: own[0]?.prompt ? "markers" : "lines+markers", name: line.label, cliponaxis: false,
    x: own.map(({ prompt, batch }) => prompt ?? log2(batch) + APART * (i - (count - 1) / 2)), y: own.map(({ speedup }) => speedup),
    line: { color: shade, dash: look.dash, width: 2.5 }, marker: { symbol: look.symbol, size: 10, color: shade },
    error_y: {
      type: "data", visible: own.some(({ error }) => error !== null), thickness: 1.5, width: 4, color: shade,
      array: own.map(({ speedup, error }) => (error === null ? 0 : ERRORS * error * speedup)),
    },
    text: own.map(hover), hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
  };
}

/** The batches at which plain steps, and rounds with a fixed draft length, reach the ridge. */
function ridges(sweep) {
  const { ridge, lines } = sweep;
  if (ridge.tokens === null || promptsOf(sweep).length) return [];
  const fixed = lines.filter(({ draft_length: length }) => Number.isInteger(length));
  return [
    ...fixed.map(({ draft_length: length }) => ({ batch: ridge.tokens / (length + 1), text: `ridge, ${length} drafts per row` })),
    { batch: ridge.tokens, text: "ridge, plain steps" },
  ];
}

/** The x axis: {title, from, to, at, words}. It shows all batches of the sweep. If plain
    steps reach the ridge before the next batch, it shows that batch too. */
function axisOf(sweep) {
  const { settings, ridge } = sweep, prompts = promptsOf(sweep);
  if (prompts.length) {
    const at = prompts.map((_, i) => i + 1);
    return { title: "prompt", from: 0.5, to: prompts.length + 0.5, at, words: at.map(String) };
  }
  const batches = [...settings.batches], last = batches.at(-1);
  if (ridge.tokens > last && ridge.tokens <= 2 * last) batches.push(2 * last);
  const at = batches.map(log2);
  return { title: "batch size, rows", from: at[0] - 0.5, to: at.at(-1) + 0.35, at, words: batches.map(String) };
}

function chart(plot, sweep) {
  const colour = plots.palette(plot), axis = plots.axis(colour), { title, from, to, at, words } = axisOf(sweep), count = sweep.lines.length;
  const traces = sweep.lines.map((line, i) => trace(colour, line, i, count, sweep.points)).filter(({ x }) => x.length);
  const most = Math.max(1.2, ...sweep.points.map(({ speedup, error }) => (speedup ?? 0) * (1 + ERRORS * (error ?? 0))));
  const marks = ridges(sweep).filter(({ batch }) => log2(batch) > from && log2(batch) < to);
  const note = { showarrow: false, font: { size: 12, color: colour("ink") } };
  plots.react(plot, traces, plots.layout(colour, `${sweep.kind} ${title} ${words}`, {
    height: 360, hovermode: "closest", margin: { l: 52, r: 14, t: 62, b: 42 },
    xaxis: {
      ...axis, range: [from, to], tickvals: at, ticktext: words, title: { text: title, standoff: 4 },
    },
    yaxis: { ...axis, range: [0, most * 1.12], ticksuffix: "×", title: { text: "speed-up over regular", standoff: 4 } },
    shapes: !traces.length ? [] : [
      { type: "line", x0: from, x1: to, y0: 1, y1: 1, line: { color: colour("ink"), width: 1.5, dash: "dot" } },
      ...(sweep.overall ? [{
        type: "rect", x0: from, x1: to, y0: sweep.overall.low, y1: sweep.overall.high, line: { width: 0 },
        fillcolor: colour("sweep-1"), opacity: 0.15, layer: "below",
      }] : []),
      ...marks.map(({ batch }) => ({
        type: "line", yref: "paper", x0: log2(batch), x1: log2(batch), y0: 0, y1: 1,
        line: { color: colour("soft"), width: 1.5, dash: "longdashdot" },
      })),
    ],
    annotations: [
      // For prompts, this label would cover a point.
      ...(promptsOf(sweep).length ? [] : [{ ...note, x: from, y: 1, xanchor: "left", yanchor: "bottom", text: "as fast as regular" }]),
      ...(sweep.overall ? [{
        ...note, x: to, y: Math.min(sweep.overall.high, most), xanchor: "right", yanchor: "bottom", text: "95 % interval over the prompts",
      }] : []),
      ...marks.map(({ batch, text }) => ({
        ...note, x: log2(batch), y: 1, yref: "paper", yanchor: "top", textangle: -90, xshift: 9, text,
      })),
    ],
  }), "no point yet");
}

const figures = {};

/** [acceptance, origin]: from the last sweep, preferably with a fixed length, else from the last race, else null. */
function measuredAcceptance() {
  const mean = (values) => sum(values) / values.length;
  const known = (figures.measured?.sweep?.points ?? []).filter((p) => p.acceptance !== null);
  // Prefer a fixed length, which drafts in every round. A policy's acceptance covers only rounds in which it drafted.
  const fixed = known.filter((p) => Number.isInteger(p.draft_length)), swept = fixed.length ? fixed : known;
  if (swept.length) return [mean(swept.map((p) => p.acceptance)), "sweep"];
  const lanes = Object.values(run()?.view?.lanes ?? {}).map(({ metrics }) => metrics.token_acceptance);
  const raced = lanes.filter(Number.isFinite);
  return raced.length ? [raced.at(-1), "race"] : [null, "assumed"];
}

/** The values for the button "Predict". An empty acceptance is replaced by the last measured one. */
export function withAcceptance([fixed, machine, models, acceptance]) {
  const [value, origin] = (acceptance ?? "").trim() === "" ? measuredAcceptance() : [acceptance, "given"];
  return [fixed, machine, models, origin === "given" ? value : value?.toFixed(3) ?? "", origin];
}

class Figure {
  constructor(root) {
    this.root = root;
    this.plot = root.querySelector(".plot");
    this.line = root.querySelector(".sweep-line");
    this.bar = root.querySelector(".sweep-bar");
    this.sweep = null;
    // The newest sweep, and the one whose points are shown.
    this.run = this.shown = null;
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

  /** The words for Stop. Points of an earlier sweep stay until there are newer ones. */
  get stopped() {
    if (!this.sweep?.points.length) return "Stopped.";
    return this.shown === this.run ? KEPT : OLDER;
  }

  /** Show the phase. `waiting` and `stopped` come from the page's own buttons. */
  show(phase, message = "") {
    this.phase = phase;
    this.line.dataset.phase = phase === "lost" ? "error" : phase;
    if (phase === "waiting") this.run = null;
    setText(this.line, message || (phase === "stopped" ? this.stopped : PHASES[phase]) || "");
    if (phase !== "running") this.bar.hidden = true;
  }

  receive(state) {
    // After Stop, values that the server sent earlier may still arrive.
    if (this.phase === "stopped") return;
    if (state.phase === "lost" && !busy(this.phase)) return;
    this.run = state.run;
    const { sweep } = state, progress = sweep?.progress;
    this.show(state.phase, state.message || (progress && state.phase === "running" ? progressOf(progress) : ""));
    this.bar.hidden = !(progress && state.phase === "running");
    if (progress) this.bar.value = progress.done / progress.races;
    if (!sweep || (!sweep.points.length && this.sweep)) return;
    this.sweep = sweep;
    if (sweep.points.length) this.shown = state.run;
    this.table();
    this.draw();
  }

  table() {
    const { lines, points, sentences, assumptions } = this.sweep;
    const labels = new Map(lines.map(({ draft_length: length, label }) => [length, label]));
    const columns = COLUMNS.filter(([, , key]) => !key || points.some((p) => p[key] !== null));
    this.root.querySelector("thead").replaceChildren(tableRow(columns.map(([name]) => name), true));
    this.root.querySelector("tbody").replaceChildren(...points.map((p) => tableRow(columns.map(([, cell]) => cell(p, labels, promptsOf(this.sweep))))));
    this.root.querySelector(".sweep-results").hidden = !points.length;
    const list = this.root.querySelector(".sweep-said");
    if (points.length && [...list.children].map((item) => item.textContent).join() !== sentences.join()) {
      list.replaceChildren(...sentences.map((text) => make("li", "", text)));
    }
    setText(this.root.querySelector(".sweep-of"), about(this.sweep));
    const assumed = this.root.querySelector(".sweep-assumed");
    assumed.hidden = !assumptions;
    assumed.querySelector("ul").replaceChildren(...(assumptions ?? []).map((text) => make("li", "", text)));
  }

  draw() {
    if (!this.visible || !this.sweep) return;
    plots.loadFor(this.plot).then(() => {
      // After a change of width, Plotly would leave the legend at its old position.
      if (this.width && this.width !== this.plot.clientWidth) {
        window.Plotly.purge(this.plot);
        this.plot.emptyAs = null;
      }
      this.width = this.plot.clientWidth;
      chart(this.plot, this.sweep);
    });
  }

  take(kind) {
    const name = `bass-sweep-${this.root.dataset.kind}`;
    if (kind === "json") download(`${name}.json`, "application/json", JSON.stringify({ sweep: 1, ...this.sweep }, null, 1));
    else if (kind === "csv") download(`${name}.csv`, "text/csv", asCsv(this.sweep));
  }
}

export const mountSweep = (element, props, watch) => {
  const root = element.querySelector(".bass-sweep"), figure = new Figure(root), { kind } = root.dataset;
  figures[kind] = figure;
  watch("value", () => props.value && figure.receive(JSON.parse(props.value)));
  document.addEventListener("click", (event) => {
    const start = event.target.closest(kind === "measured" ? "#sweep-measure" : "#sweep-predict");
    if (start && !start.disabled && !busy(figure.phase)) figure.show("waiting", kind === "measured" ? "" : "Predicting…");
    else if (kind === "measured" && busy(figure.phase) && event.target.closest("#sweep-stop")) figure.show("stopped");
  });
};
