/* The summary after a run: a figure, a table, and the buttons that export the run. */
import { on, number, percent, used, over, setText, tableRow, what, whole } from "bass/page/page.js";
import { run, sum, laneName } from "bass/race/run.js";
import { laneTime, wear } from "bass/race/predicted.js";
import { plots } from "bass/page/plots.js";
import { copy, download, asJson, asCsv, snippet, link, keep } from "bass/race/export.js";

const coupled = () => run().head.settings.verification === "coupled" && run().head.settings.temperature > 0;

const trees = () => [...run().lanes.values()].some((lane) => lane.trees);

/** For a coupled run: the mean of min(1, p/q) over the tested drafts, which is the share that rejection sampling would accept. */
function rejectionSampling(name) {
  const steps = run().lanes.get(name).sequences.flatMap((sequence) => sequence.steps);
  // Leave out trees: with several candidates at one position, min(1, p/q) of a single one is not meaningful.
  const tested = steps.filter(({ parents }) => !parents).flatMap(({ drafts, accepted }) => drafts.slice(0, accepted + 1));
  const chances = tested.filter(({ p, q }) => p !== null && q > 0).map(({ p, q }) => Math.min(1, p / q));
  return chances.length ? sum(chances) / chances.length : null;
}

/** Whether a lane's sequences all ended at the same time, so that none was first or last. */
const together = (name) => {
  const ends = run().lanes.get(name).sequences.map(({ tokens }) => tokens.at(-1)?.ms);
  return ends.every((ms) => ms === ends[0]);
};
const apart = () => [...run().lanes.keys()].some((name) => !together(name));
const unlessTogether = (value, name) => (together(name) ? "ended together" : number(value, 2));

// A row of the table: [key of its formula, label, its cell for a lane, whether the run has this row].
const ROWS = [
  ["ms_per_token", () => wear("ms per token of one sequence"), (m) => number(m.ms_per_token, 2)],
  ["speedup", () => wear(`speed-up over ${laneName(run().head.reference).toLowerCase()}`), (m) => number(m.speedup, 2, "×")],
  ["round_cost", () => wear("cost of a round, plain steps"), (m) => number(m.round_cost, 2)],
  ["throughput_tps", () => wear("throughput, tokens/s"), (m) => number(m.throughput_tps, 1)],
  ["ptl", () => wear("per-token latency, First, ms"), (m, lane, name) => unlessTogether(m.ptl_first_ms, name), apart],
  ["ptl", () => wear("per-token latency, Last, ms"), (m, lane, name) => unlessTogether(m.ptl_last_ms, name), apart],
  ["ptl", () => wear("per-token latency, All, ms"), (m) => number(m.ptl_all_ms, 2)],
  ["ttft_ms", () => wear("time to first token, ms"), (m) => number(m.ttft_ms, 1)],
  ["acceptance_rate", () => (trees() ? "drafts accepted (for trees: path / nodes)" : "draft acceptance rate"),
    (m) => percent(m.acceptance_rate, 1)],
  ["drafts", "drafts accepted, of all", (m) => (m.drafted ? `${m.accepted} of ${m.drafted}` : number(null))],
  ["token_acceptance", "token acceptance", (m) => percent(m.token_acceptance, 1)],
  ["rejection_sampling", "token acceptance by rejection sampling, estimated",
    (m, lane, name) => percent(rejectionSampling(name), 1), coupled],
  ["mean_acceptance_length", "mean acceptance length", (m) => number(m.mean_acceptance_length, 2)],
  ["rounds", "rounds", (m) => number(m.rounds, 0)],
  ["target_forwards", "target forwards", (m) => number(m.target_forwards, 0)],
  ["new_tokens", "new tokens", (m) => number(m.new_tokens, 0)],
  ["flops_utilization", () => wear("FLOPs utilisation"), (m) => used(m.flops_utilization)],
  ["bandwidth_utilization", () => wear("bandwidth utilisation"), (m) => used(m.bandwidth_utilization)],
  ["ended", "ended by the model (EOS)", (m, lane) =>
    `${lane.finish_reasons.filter((r) => r === "eos").length} of ${lane.finish_reasons.length}`],
  ["clock_ms", () => wear("lane time, s"), (m, lane) => number(lane.clock_ms / 1000, 2)],
];

function traces(lanes, colour) {
  const marks = apart() ? ["First", "Last", "All"] : ["All"];
  const bars = Object.entries(lanes).map(([name, { metrics: m }]) => ({
    type: "bar", name: laneName(name), x: marks,
    y: [...(apart() ? [together(name) ? null : m.ptl_first_ms, together(name) ? null : m.ptl_last_ms] : []), m.ptl_all_ms],
    marker: { color: plots.lineOf(colour, name).color }, legendgroup: name,
    hovertemplate: "%{y:.2f} ms<extra>%{fullData.name}</extra>",
  })).filter((bar) => bar.y.some((value) => value !== null));
  const lines = Object.entries(lanes).filter(([, lane]) => lane.metrics.per_position_acceptance?.length)
    .map(([name, { metrics: m }]) => ({
      type: "scatter", mode: "lines+markers", name: laneName(name), showlegend: false, legendgroup: name,
      x: m.per_position_acceptance.map((_, i) => i + 1), y: m.per_position_acceptance.map((v) => v * 100),
      xaxis: "x2", yaxis: "y2", line: plots.lineOf(colour, name), marker: { size: 5 },
      hovertemplate: "position %{x}: %{y:.0f} %<extra>%{fullData.name}</extra>",
    }));
  return [...bars, ...lines];
}

class Summary {
  constructor(element) {
    this.element = element;
    this.took = element.querySelector(".took");
    on("start", () => (element.hidden = true));
    on("phase", (phase) => over(phase) && this.show());
    whole(() => this.draw());
    plots.onTheme(() => this.draw());
    new ResizeObserver(() => this.drawn !== element.clientWidth && this.draw()).observe(element);
    plots.whenSeen([element.querySelector(".summary-figure")], () => this.draw());
    element.addEventListener("click", (event) => this.take(event.target.closest("[data-take]")?.dataset.take));
  }

  show() {
    const view = run()?.view;
    if (!view) return;
    this.element.hidden = false;
    this.table(view.lanes);
    this.budget(view.lanes, run().head.settings);
    const { head } = run(), repeatable = head.settings.seed !== undefined && (!head.clock || Boolean(head.code));
    const details = this.element.querySelector(".snippet");
    details.hidden = !repeatable;
    this.element.querySelector("[data-take=link]").hidden = !repeatable;
    if (repeatable) setText(details.querySelector("code"), snippet());
  }

  budget(lanes, { time_budget_ms: budget }) {
    const done = ({ finish_reasons: reasons }) => reasons.filter((r) => ["eos", "length", "stop", "grammar"].includes(r)).length;
    const parts = Object.entries(lanes).map(([name, lane]) => `${laneName(name)} ${done(lane)} of ${lane.finish_reasons.length}`);
    setText(this.element.querySelector(".budget-line"),
      budget ? `Sequences finished within ${number(budget, 0)} ms of ${laneTime()}: ${parts.join(", ")}.` : "");
  }

  /** The rows of the table that this run has. */
  usedRows() {
    return ROWS.filter(([, , , has]) => !has || has());
  }

  rows(lanes) {
    const names = Object.keys(lanes);
    return [["", ...names.map(laneName)], ...this.usedRows().map(([, label, cell]) =>
      [typeof label === "string" ? label : label(), ...names.map((name) => cell(lanes[name].metrics, lanes[name], name))])];
  }

  table(lanes) {
    const [[, ...head], ...rows] = this.rows(lanes), elements = rows.map((row) => tableRow(row));
    this.element.querySelector("thead").replaceChildren(tableRow(["Figure", ...head], true));
    this.usedRows().forEach(([key], i) => elements[i].firstElementChild.append(what(key)));
    this.element.querySelector("tbody").replaceChildren(...elements);
  }

  draw() {
    const view = run()?.view, plot = this.element.querySelector(".plot");
    if (!view || this.element.hidden || !window.Plotly) return;
    const colour = plots.palette(plot), axis = plots.axis(colour), type = plots.type(), narrow = plot.clientWidth < 560 * type;
    this.drawn = this.element.clientWidth;
    const title = (text) => ({ text, standoff: 4, font: { size: 11.5 } });
    const domains = narrow ? [[0, 1], [0.58, 1], [0, 1], [0, 0.38]] : [[0, 0.46], [0, 1], [0.55, 1], [0, 1]];
    const height = (narrow ? 420 : 240) * type;
    plot.style.height = `${height}px`;
    // After a change of height, Plotly would leave the legend at its old position.
    if (plot._fullLayout && plot._fullLayout.height !== height) window.Plotly.purge(plot);
    const drawn = traces(view.lanes, colour), drafted = drawn.some((trace) => trace.xaxis === "x2");
    plots.react(plot, drawn, plots.layout(colour, run().head.run, {
      height, hovermode: "closest", barmode: "group", margin: { l: 52, r: 10, t: 26, b: 40 },
      xaxis: { ...axis, domain: domains[0], anchor: "y" },
      yaxis: { ...axis, domain: domains[1], anchor: "x", title: title("ms per token of one sequence") },
      xaxis2: { ...axis, domain: domains[2], anchor: "y2", title: title("draft position"), dtick: 2 },
      yaxis2: { ...axis, domain: domains[3], anchor: "x2", range: [0, 103], ticksuffix: " %", title: title("accepted") },
      annotations: drafted ? [] : [{
        text: "n/a: nothing was drafted", showarrow: false, font: { size: 14, color: colour("soft") },
        xref: "paper", yref: "paper", x: narrow ? 0.5 : 0.775, y: narrow ? 0.19 : 0.5,
      }],
    }));
  }

  async take(kind) {
    const report = (done, words) => setText(this.took, done ? words : "The browser refused access to the clipboard.");
    if (kind === "json") download("bass-run.json", "application/json", asJson());
    else if (kind === "csv") download("bass-run.csv", "text/csv", asCsv());
    else if (kind === "table") {
      const rows = this.rows(run().view.lanes).map((cells) => cells.join("\t"));
      report(await copy(`${rows.join("\n")}\n`), "Table copied.");
    } else if (kind === "snippet") report(await copy(snippet()), "Code copied.");
    else if (kind === "link") {
      const address = link(run().head.settings);
      keep(address);
      report(await copy(address), "Link copied. It is in the address bar too.");
    }
  }
}

export const mountSummary = (element) => new Summary(element.querySelector(".bass-summary"));
