/* Contract: draws the live charts with Plotly.react, a few times a second, and the device's readings.
   A value that is missing is a gap or "n/a", never 0. Zoom and hidden lines survive a redraw (uirevision). */
(() => {
  "use strict";
  const { on, number, setText } = window.Bass;
  const REDRAW_MS = 220;
  // Pause after a drawing, in multiples of its duration: drawing gets at most a fifth of the page's thread.
  const BUSY = 4;
  const LANES = { regular: ["Regular", "dot"], speculative: ["Speculative", "dash"], bass: ["BASS", "solid"] };
  const CONFIG = {
    responsive: true, displaylogo: false, plotlyServerURL: "", locale: "en-US",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d", "toImage"],
  };
  const READINGS = {
    name: (d) => d.name ?? "n/a",
    gpu_utilization: (d) => number(d.gpu_utilization, 0, " %"),
    gpu_memory_mb: (d) => number(d.gpu_memory_mb, 0, " MB") +
      (d.gpu_memory_total_mb ? ` of ${number(d.gpu_memory_total_mb, 0, " MB")}` : ""),
    gpu_power_w: (d) => number(d.gpu_power_w, 0, " W"),
    cpu_percent: (d) => number(d.cpu_percent, 0, " %") + (d.cpu_count ? ` of ${d.cpu_count * 100} %` : ""),
    rss_mb: (d) => number(d.rss_mb, 0, " MB"),
  };

  const some = (column) => (column ?? []).some((value) => value !== null);
  const scaled = (column, factor) => column.map((value) => (value === null ? null : value * factor));

  /** Colours come from the stylesheet, so that light and dark are decided in one place. */
  function palette(element) {
    const style = getComputedStyle(element);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    return Object.assign(colour, { font: style.fontFamily });
  }

  function laneTraces(charts, colour, column, factor) {
    return Object.entries(LANES).filter(([lane]) => some(charts?.lanes[lane]?.[column])).map(([lane, look]) => ({
      type: "scatter", mode: "lines", name: look[0],
      x: scaled(charts.lanes[lane].clock_ms, 1e-3),
      y: scaled(charts.lanes[lane][column], factor),
      line: { color: colour(`lane-${lane}`), dash: look[1], width: 2.5 },
    }));
  }

  function deviceTraces(charts, colour) {
    const series = charts?.series ?? {};
    const gpu = charts?.device.kind === "cuda";
    const share = gpu ? ["gpu_utilization", "GPU utilization (NVML)", 1]
      : ["cpu_percent", "CPU share", 1 / (charts?.device.cpu_count || 1)];
    const memory = gpu ? ["gpu_memory_mb", "GPU memory"] : ["rss_mb", "Memory"];
    const line = (name, label, y, look) => ({
      type: "scatter", mode: "lines", name: label, x: scaled(series.elapsed_ms, 1e-3), y, ...look,
    });
    return [
      some(series[share[0]]) && line(share[0], share[1], scaled(series[share[0]], share[2]),
        { line: { color: colour("chart-share"), width: 2.5 } }),
      some(series[memory[0]]) && line(memory[0], memory[1], series[memory[0]],
        { yaxis: "y2", line: { color: colour("chart-memory"), dash: "dash", width: 2 } }),
    ].filter(Boolean);
  }

  function layout(charts, colour, x, y, y2) {
    const axis = { gridcolor: colour("chart-grid"), zeroline: false, rangemode: "tozero", nticks: 6 };
    return {
      uirevision: charts?.run ?? "none", height: 190, margin: { l: 42, r: y2 ? 60 : 10, t: 26, b: 34 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified", dragmode: "zoom",
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("soft"), activecolor: colour("ink"), orientation: "v" },
      font: { size: 12, color: colour("soft"), family: colour.font },
      showlegend: true, legend: {
        orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 },
      },
      xaxis: { ...axis, title: { text: x, standoff: 4, font: { size: 11.5 } } },
      yaxis: { ...axis, ...y },
      ...(y2 && { yaxis2: { ...axis, overlaying: "y", side: "right", showgrid: false, ...y2 } }),
    };
  }

  const PERCENT = { range: [0, 103], ticksuffix: " %" };
  const CHARTS = {
    latency: (charts, colour) => [
      laneTraces(charts, colour, "ms_per_token", 1),
      layout(charts, colour, "seconds of lane time", {})],
    acceptance: (charts, colour) => [
      laneTraces(charts, colour, "acceptance_rate", 100),
      layout(charts, colour, "seconds of lane time", PERCENT)],
    device: (charts, colour) => [
      deviceTraces(charts, colour),
      layout(charts, colour, "seconds since the start", PERCENT, { ticksuffix: " MB", tickformat: ",d", nticks: 4 })],
  };

  function draw(plot, name, charts) {
    const colour = palette(plot);
    const [traces, shape] = CHARTS[name](charts, colour);
    if (!traces.length) {
      for (const axis of ["xaxis", "yaxis", "yaxis2"]) if (shape[axis]) shape[axis].visible = false;
      shape.annotations = [{
        text: charts ? "n/a" : "no run yet", showarrow: false, x: 0.5, y: 0.5, xref: "paper", yref: "paper",
        font: { size: 14, color: colour("soft") },
      }];
    }
    window.Plotly.react(plot, traces, shape, CONFIG);
  }

  /** Redraws the charts in turn, one a task: each at most once in REDRAW_MS, and more seldom on a busy machine. */
  class Painter {
    constructor(plots) {
      this.plots = plots;
      this.charts = null;
      this.stale = [];
      this.timer = null;
    }

    soon() {
      this.stale = [...new Set([...this.stale, ...Object.keys(this.plots)])];
      this.wait(0);
    }

    wait(ms) {
      if (this.timer === null && this.stale.length && window.Plotly) this.timer = setTimeout(() => this.paint(), ms);
    }

    paint() {
      this.timer = null;
      const name = this.stale.shift(), start = performance.now();
      draw(this.plots[name], name, this.charts);
      const pause = REDRAW_MS / Object.keys(this.plots).length;
      this.wait(Math.max(pause, BUSY * (performance.now() - start)));
    }
  }

  window.Bass.mountCharts = (element, plotly) => {
    const plots = {};
    for (const figure of element.querySelectorAll("[data-chart]")) {
      plots[figure.dataset.chart] = figure.querySelector(".plot");
    }
    const readings = [...element.querySelectorAll("[data-reading]")];
    const painter = new Painter(plots);
    on("view", ({ device }) => {
      for (const place of readings) setText(place, READINGS[place.dataset.reading](device));
    });
    on("charts", (charts) => {
      painter.charts = charts;
      painter.soon();
    });
    // The theme is a class on the body.
    new MutationObserver(() => painter.soon()).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    const script = document.createElement("script");
    script.src = plotly;
    script.onload = () => painter.soon();
    document.head.append(script);
  };
})();
