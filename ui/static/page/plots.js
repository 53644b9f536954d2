/* Common code of all plots: colours and font size from the stylesheet, axes, and loading of Plotly.
   - `react` draws a plot. It preserves zoom, hidden lines and the hover box, and shows "n/a" if there is nothing to draw.
   - `drawAll` draws all plots, even those out of view.
   - Plotly is loaded once, from the page's own host, when the first chart comes into view, but not before the opening and the
     race have ended: its script is one task of half a second or more. If loading fails, the plots say so until it succeeds. */
import { setText, on, tell, make, busy } from "bass/page/page.js";
import { lookOf } from "bass/race/run.js";

const CONFIG = {
  responsive: true, displaylogo: false, plotlyServerURL: "", locale: "en-US",
  modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toImage", "sendChartToCloud"],
};
const FAILED = "The chart could not be loaded. The page tries again every few seconds.", RETRY_MS = 3000;
const LATER = "The charts are drawn once the opening or the race has ended.";
const drawings = [], waiting = new Set();
let loading = null, ready = null, opens = true, races = false;

/** Resolves when Plotly is loaded. After a failure, the next call tries again. */
function load() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    Object.assign(script, { src: plots.address, onload: resolve, onerror: reject });
    document.head.append(script);
  }).catch((error) => {
    loading = null;
    throw error;
  });
  return loading;
}

async function loadPatiently() {
  for (;;) {
    try {
      return await load();
    } catch {
      for (const plot of waiting) if (!plot._fullLayout) setText(plot, FAILED);
      await new Promise((go) => setTimeout(go, RETRY_MS));
    }
  }
}

/** Resolves once Plotly is loaded, however many tries it takes. After a failed try, these plots say so. */
function loadFor(...plots) {
  for (const plot of plots) waiting.add(plot);
  ready ??= loadPatiently();
  return ready;
}

on("opening", (opening) => (opens = opening));
on("phase", (phase) => (races = busy(phase)));

/** Resolves once neither the opening nor a race is under way. */
const quiet = () => new Promise((resolve) => {
  for (const kind of ["opening", "phase"]) on(kind, () => opens || races || resolve());
});

/** Say in an empty plot why it waits, with a button that ends the opening. */
function announce(plot) {
  const button = make("button", "action", "Draw them now");
  button.type = "button";
  button.addEventListener("click", () => {
    button.remove();
    tell("touched");
  });
  plot.replaceChildren(make("p", "part-about", LATER), button);
}

/** Call `draw` once one of the elements has come into view and Plotly is loaded. */
function whenSeen(elements, draw) {
  const watch = new IntersectionObserver(async (entries) => {
    const seen = entries.find(({ isIntersecting }) => isIntersecting);
    if (!seen) return;
    watch.disconnect();
    if (!ready && (opens || races)) announce(seen.target.querySelector(".plot"));
    await quiet();
    await loadFor(...elements.map((element) => element.querySelector(".plot")));
    draw();
  });
  for (const element of elements) watch.observe(element);
}

/** A function that returns colours of the stylesheet, which depend on light or dark mode. */
function palette(element) {
  const style = getComputedStyle(element);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  return Object.assign(colour, { font: style.fontFamily });
}

/** The scale of the page's font size, 1 by default. */
const type = () => Number(getComputedStyle(document.body).getPropertyValue("--type")) || 1;

/** The same traces or layout with every font and margin scaled by `by`. */
function enlarged(value, by) {
  if (by === 1 || value === null || typeof value !== "object") return value;
  if (Array.isArray(value)) return typeof value[0] === "object" ? value.map((entry) => enlarged(entry, by)) : value;
  const times = (part) => Object.fromEntries(Object.entries(part).map(([name, size]) =>
    [name, Number.isFinite(size) ? size * by : size]));
  return Object.fromEntries(Object.entries(value).map(([name, part]) =>
    [name, /font$|^margin$/.test(name) ? times(part) : enlarged(part, by)]));
}

function lineOf(colour, lane, width = 2.5) {
  const look = lookOf(lane);
  return { color: colour(look.colour), dash: look.dash, width };
}

function axis(colour) {
  return { gridcolor: colour("chart-grid"), zeroline: false, rangemode: "tozero", nticks: 6 };
}

function layout(colour, run, shape) {
  return {
    uirevision: run ?? "none", height: 190 * type(), margin: { l: 46, r: 10, t: 26, b: 34 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified", dragmode: "zoom",
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("ink"), orientation: "v" },
    font: { size: 12, color: colour("soft"), family: colour.font },
    showlegend: true, legend: {
      orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 },
    },
    ...shape,
  };
}

function nothing(colour, shape, words) {
  for (const name of Object.keys(shape)) if (/^[xy]axis/.test(name)) shape[name].visible = false;
  shape.annotations = [{
    text: words, showarrow: false, x: 0.5, y: 0.5, xref: "paper", yref: "paper",
    font: { size: 14, color: colour("soft") },
  }];
}

/** Draw or redraw a plot. The hover box stays at the pointer. A plot that stays empty is not redrawn. */
function react(plot, traces, shape, empty = "n/a") {
  const by = type(), state = traces.length ? null : [empty, shape.font.color, by, plot.clientWidth].join();
  if (state !== null && plot.emptyAs === state) return;
  plot.emptyAs = state;
  if (!traces.length) nothing(palette(plot), shape, empty);
  const hovered = plot.matches(":hover") && plot.hoveredAt;
  // Plotly draws below existing content, such as the message of a failed load: remove it.
  if (!plot._fullLayout) plot.replaceChildren();
  window.Plotly.react(plot, enlarged(traces, by), enlarged(shape, by), CONFIG);
  // Plotly checks the width only when the window is resized.
  if (Math.abs(plot._fullLayout.width - plot.clientWidth) > 1) window.Plotly.relayout(plot, { autosize: true });
  if (!plot.hoverKept) {
    plot.hoverKept = true;
    plot.on("plotly_hover", (event) => (plot.hoveredAt = event.xvals?.[0]));
    plot.addEventListener("pointerleave", () => (plot.hoveredAt = undefined));
  }
  if (hovered !== false && hovered !== undefined && traces.length) window.Plotly.Fx.hover(plot, { xval: hovered });
}

/** Call `draw` when the body's class changes, i.e. the theme or the font size. `now` draws at once, for print. */
function onTheme(draw, now = draw) {
  drawings.push(now);
  new MutationObserver(draw).observe(document.body, { attributes: true, attributeFilter: ["class"] });
}

const drawAll = () => drawings.forEach((draw) => draw());

export const plots = { address: "", load, loadFor, whenSeen, palette, type, lineOf, axis, layout, react, onTheme, drawAll };
