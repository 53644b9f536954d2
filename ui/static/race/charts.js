/* The live charts and the device's readings. They are drawn a few times per second: only charts in view during a race, all
   of them afterwards. A missing value is a gap or "n/a", never 0. "Pause charts" freezes the data of the charts, not the
   run: a chart that comes into view, or is redrawn for a new theme, still shows the frozen data. A new run ends the
   pause. */
import { on, soon, number, used, setText, make } from "bass/page/page.js";
import { lookOf, laneName } from "bass/race/run.js";
import { laneTime } from "bass/race/predicted.js";
import { plots } from "bass/page/plots.js";

const REDRAW_MS = 300;
// After a drawing, pause for BUSY times its duration, so that drawing takes at most a twentieth of the page's thread:
// it may slow down models on the same machine. LONGEST_MS limits the pause, because on a busy machine even a drawing
// with little work can take long.
const BUSY = 19, LONGEST_MS = 5000;
const READINGS = {
  name: (d) => d.name ?? "n/a",
  gpu_utilization: (d) => number(d.gpu_utilization, 0, " %"),
  gpu_memory_mb: (d) => number(d.gpu_memory_mb, 0, " MB") +
    (d.gpu_memory_total_mb ? ` of ${number(d.gpu_memory_total_mb, 0, " MB")}` : ""),
  gpu_power_w: (d) => number(d.gpu_power_w, 0, " W"),
  gpu_energy_mj: (d) => number(d.gpu_energy_mj === null || d.gpu_energy_mj === undefined ? null : d.gpu_energy_mj / 1000, 0, " J"),
  gpu_sm_percent: (d) => number(d.gpu_sm_percent, 0, " %"),
  gpu_tensor_percent: (d) => number(d.gpu_tensor_percent, 0, " %"),
  gpu_dram_percent: (d) => number(d.gpu_dram_percent, 0, " %"),
  flops_utilization: (d, lanes) => flops(lanes),
  cpu_percent: (d) => number(d.cpu_percent, 0, " %") + (d.cpu_count ? ` of ${d.cpu_count * 100} %` : ""),
  rss_mb: (d) => number(d.rss_mb, 0, " MB"),
};

/** FLOPs utilisation of all lanes that have one, in words. */
function flops(lanes) {
  const known = Object.entries(lanes).filter(([, lane]) => Number.isFinite(lane.metrics.flops_utilization));
  return known.map(([name, lane]) =>
    `${laneName(name)} ${used(lane.metrics.flops_utilization)}`).join(", ") || "n/a";
}

const some = (column) => (column ?? []).some((value) => value !== null);
const scaled = (column, factor) => column.map((value) => (value === null ? null : value * factor));

const HOVER = "%{y:.4~g}<extra>%{fullData.name}</extra>";

function laneTraces(group, x, colour, column, factor, shape) {
  return Object.entries(group ?? {}).filter(([, lane]) => some(lane[column])).map(([name, lane]) => ({
    type: "scatter", mode: "lines", name: laneName(name), hovertemplate: HOVER,
    x: scaled(lane[x], 1e-3), y: scaled(lane[column], factor),
    line: { ...plots.lineOf(colour, name), ...(shape && { shape, width: 1.5 }) },
  }));
}

function deviceTrace(charts, name, label, factor, look) {
  const series = charts?.series ?? {};
  return some(series[name]) ? [{
    type: "scatter", mode: "lines", name: label, hovertemplate: HOVER, x: scaled(series.elapsed_ms, 1e-3),
    y: scaled(series[name], factor), ...look,
  }] : [];
}

const gpu = (charts) => charts?.device.kind === "cuda";

function deviceTraces(charts, colour) {
  const look = { line: { color: colour("chart-share"), width: 2.5 } };
  return gpu(charts) ? deviceTrace(charts, "gpu_utilization", "GPU utilization (NVML)", 1, look)
    : deviceTrace(charts, "cpu_percent", "CPU share", 1 / (charts?.device.cpu_count || 1), look);
}

function memoryTraces(charts, colour) {
  const memory = { line: { color: colour("chart-memory"), width: 2.5 } };
  const power = { yaxis: "y2", line: { color: colour("chart-share"), dash: "dash", width: 2 } };
  return [
    ...(gpu(charts) ? deviceTrace(charts, "gpu_memory_mb", "GPU memory", 1, memory)
      : deviceTrace(charts, "rss_mb", "Memory", 1, memory)),
    ...deviceTrace(charts, "gpu_power_w", "Power", 1, power),
  ];
}

const CACHE_PARTS = [["shared", "Shared", "chart-memory"], ["own", "Rows' own", "chart-share"], ["draft", "Draft", "soft"]];

/** Bars for the size of each lane's caches, and a mark for their size if every row had its own copy of the prefix. */
function cacheTraces(charts, colour) {
  const lanes = Object.entries(charts?.cache ?? {}).filter(([, sizes]) => sizes);
  const x = lanes.map(([name]) => laneName(name)), megabytes = (bytes) => bytes / 2 ** 20;
  const bars = CACHE_PARTS.map(([part, name, shade]) => ({
    type: "bar", name, x, y: lanes.map(([, sizes]) => megabytes(sizes[part] ?? 0)), marker: { color: colour(shade) },
    hovertemplate: "%{y:,.1f} MB",
  })).filter(({ y }) => y.some((value) => value > 0));
  const totals = x.map((_, i) => bars.reduce((sum, { y }) => sum + y[i], 0));
  // A lane that shares nothing has no mark.
  const copies = lanes.map(([, sizes], i) => {
    const value = megabytes(sizes.copies);
    return value > totals[i] * 1.001 ? value : null;
  });
  const labels = (values) => values.map((value) => (value === null ? "" : number(value, value < 10 ? 1 : 0, " MB")));
  const over = { type: "scatter", x, textposition: "top center", cliponaxis: false, textfont: { size: 11 } };
  return [
    ...bars,
    ...(bars.length ? [{ ...over, mode: "text", y: totals, text: labels(totals), showlegend: false, hoverinfo: "skip" }] : []),
    ...(some(copies) ? [{
      ...over, mode: "markers+text", name: "As copies", y: copies, text: labels(copies),
      marker: { symbol: "line-ew-open", size: 34, line: { width: 2.5 }, color: colour("ink") },
      hovertemplate: "%{y:,.1f} MB",
    }] : []),
  ];
}

const LANE_TIME = () => `seconds of ${laneTime()}`, RUN_TIME = "seconds since the start";
const SHARE = { ticksuffix: " %" };
const PERCENT = { range: [0, 103], ticksuffix: " %" };
const MEMORY = { ticksuffix: " MB", tickformat: ",d", nticks: 4 };
const CHARTS = {
  latency: (charts, colour) => [laneTraces(charts?.lanes, "clock_ms", colour, "ms_per_token", 1), LANE_TIME(), {}],
  race: (charts, colour) => [laneTraces(charts?.lanes, "clock_ms", colour, "new_tokens", 1), LANE_TIME(), {}],
  acceptance: (charts, colour) =>
    [laneTraces(charts?.lanes, "clock_ms", colour, "acceptance_rate", 100), LANE_TIME(), PERCENT],
  lengths: (charts, colour) =>
    [laneTraces(charts?.rounds, "time_ms", colour, "draft_length", 1, "hv"), LANE_TIME(), {}],
  flops: (charts, colour) => [laneTraces(charts?.lanes, "clock_ms", colour, "flops_utilization", 100), LANE_TIME(), SHARE],
  device: (charts, colour) => [deviceTraces(charts, colour), RUN_TIME, PERCENT],
  memory: (charts, colour) => [memoryTraces(charts, colour), RUN_TIME, MEMORY, { ticksuffix: " W", nticks: 4 }],
  cache: (charts, colour) => [cacheTraces(charts, colour), "", MEMORY],
};

function draw(plot, name, charts) {
  const colour = plots.palette(plot), axis = plots.axis(colour);
  const [traces, x, y, y2] = CHARTS[name](charts, colour);
  const right = traces.some((trace) => trace.yaxis === "y2"), bars = traces.some((trace) => trace.type === "bar");
  plots.react(plot, traces, plots.layout(colour, charts?.run, {
    xaxis: { ...axis, hoverformat: ".2f", title: { text: x, standoff: 4, font: { size: 11.5 } } },
    yaxis: { ...axis, ...y },
    // The lanes' lines are named once, above the charts.
    showlegend: right || bars,
    ...(bars && { barmode: "stack", bargap: 0.45 }),
    ...(right && { yaxis2: { ...axis, overlaying: "y", side: "right", showgrid: false, ...y2 } }),
    margin: { l: y.tickformat ? 70 : 46, r: right ? 50 : 10, t: right || bars ? 26 : 10, b: 34 },
  }), charts ? "n/a" : "no run yet");
}

/** Redraws the charts in turn, one per task: each at most once per REDRAW_MS, less often on a busy machine. */
class Painter {
  constructor(figures) {
    this.figures = figures;
    this.charts = null;
    this.newest = null;
    this.stale = new Set();
    this.seen = new Set();
    this.timer = null;
    this.drawing = false;
    this.paused = false;
    this.racing = false;
    // The newest run for which a FLOPs utilisation is known.
    this.measured = null;
    // During a race: the earliest times of the next drawing of a chart with lines, and of an empty one.
    this.due = { lines: 0, empty: 0 };
    const watch = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        this.seen[isIntersecting ? "add" : "delete"](target.dataset.chart);
      }
      this.plan();
    });
    for (const plot of Object.values(figures)) watch.observe(plot.closest("[data-chart]"));
  }

  take(charts) {
    this.newest = charts;
    if (!this.paused) this.show();
  }

  show() {
    this.charts = this.newest;
    this.fold();
    this.soon();
  }

  /** Hide the FLOPs chart after a race without a FLOPs utilisation (on a device with unknown peak). Show it again once a
      race has one. */
  fold() {
    if (!this.charts) return;
    const { run, lanes } = this.charts, figure = this.figures.flops.closest("[data-chart]");
    if (Object.values(lanes).some((lane) => some(lane.flops_utilization))) this.measured = run;
    figure.hidden = this.measured !== run && (figure.hidden || !this.racing);
  }

  soon() {
    for (const name of Object.keys(this.figures)) this.stale.add(name);
    this.plan();
  }

  race(racing) {
    // Draw a new race at once, without the pause after the last drawing.
    if (racing && !this.racing) this.due = { lines: 0, empty: 0 };
    this.racing = racing;
    this.fold();
    this.plan();
  }

  kind(name) {
    return this.figures[name].data?.length ? "lines" : "empty";
  }

  /** Set the timer for the next drawing, of the chart that is due first. */
  plan() {
    if (this.drawing || !window.Plotly) return;
    clearTimeout(this.timer);
    const due = (name) => this.due[this.kind(name)];
    const [name] = [...this.stale].filter((name) => !this.racing || this.seen.has(name)).sort((a, b) => due(a) - due(b));
    if (!name) return;
    const ms = this.racing ? Math.max(0, due(name) - performance.now()) : 0;
    this.timer = setTimeout(() => this.paint(name), ms);
  }

  paint(name) {
    const start = performance.now(), before = this.kind(name);
    this.drawing = true;
    this.stale.delete(name);
    // Part of Plotly's work runs in promises, which are finished when the next task starts.
    setTimeout(() => {
      const end = performance.now(), after = this.kind(name), pause = REDRAW_MS / Object.keys(this.figures).length;
      this.drawing = false;
      // A chart's first drawing with lines takes several times as long as later ones, so no pause is derived from it.
      if (before === "lines") this.due.lines = end + Math.max(pause, Math.min(BUSY * (end - start), LONGEST_MS));
      else if (after === "empty") this.due.empty = end + REDRAW_MS;
      this.plan();
    });
    draw(this.figures[name], name, this.charts);
  }

  /** Draw every chart at once, in view or not. */
  drawAll() {
    if (!window.Plotly) return;
    for (const [name, plot] of Object.entries(this.figures)) draw(plot, name, this.charts);
  }

  pause(paused) {
    this.paused = paused;
    if (!paused) return this.show();
    // The charts in view stay as they are. The others are still drawn, with the frozen data, when they come into view.
    for (const name of this.seen) this.stale.delete(name);
    this.plan();
  }
}

/** Name the lines of a run's lanes. */
function drawKey(list, lanes) {
  list.replaceChildren(...lanes.map((name) => {
    const { colour, dash } = lookOf(name);
    const item = make("li", "", laneName(name)), line = make("span", `line line-${dash}`);
    line.style.setProperty("--line-colour", `var(--${colour})`);
    item.prepend(line);
    return item;
  }));
}

export const mountCharts = (element, plotly) => {
  const figures = {};
  for (const figure of element.querySelectorAll("[data-chart]")) {
    figures[figure.dataset.chart] = figure.querySelector(".plot");
  }
  const readings = [...element.querySelectorAll("[data-reading]")];
  const painter = new Painter(figures), key = element.querySelector(".line-key");
  const button = element.querySelector("#pause-charts");
  const pause = (paused) => {
    setText(button, paused ? "Resume charts" : "Pause charts");
    painter.pause(paused);
  };
  button.addEventListener("click", () => pause(!painter.paused));
  let shown = null;
  on("start", (head) => {
    drawKey(key, head.lanes);
    if (painter.paused && head !== shown) pause(false);
    shown = head;
  });
  let view = null;
  const read = () => {
    for (const shown of readings) {
      const words = READINGS[shown.dataset.reading](view.device, view.lanes);
      setText(shown, words);
      // Hide counters that only some GPUs have.
      if (/energy|_percent$/.test(shown.dataset.reading) && shown.dataset.reading.startsWith("gpu_")) shown.parentElement.hidden = words === "n/a";
    }
  };
  on("view", (newest) => {
    view = newest;
    soon(read);
  });
  on("charts", (charts) => painter.take(charts));
  on("phase", (phase) => painter.race(["waiting", "running", "playing"].includes(phase)));
  plots.onTheme(() => painter.soon(), () => painter.drawAll());
  plots.address = plotly;
  plots.whenSeen(Object.values(figures).map((plot) => plot.closest("[data-chart]")), () => painter.soon());
};
