/* Draws a sweep: speed-up over the batch. Contract: `sweepChart(plot, sweep)` draws the points that are there; lines differ
   by colour, dash and marker; a point's bar is two standard errors; 1 is labelled as regular decoding, the ridge where it is known. A
   missing figure is a gap. */
(() => {
  "use strict";
  const { number, plots } = window.Bass;
  // By a line's place.
  const LOOKS = [
    { colour: "sweep-1", dash: "solid", symbol: "circle" }, { colour: "sweep-2", dash: "dash", symbol: "square" },
    { colour: "sweep-3", dash: "dot", symbol: "diamond" },
  ];
  // Points of one batch stand side by side, so that their bars can be told apart; in doublings of the batch.
  const APART = 0.05;
  const ERRORS = 2;
  const lookOf = (i) => LOOKS[i % LOOKS.length];
  const log2 = Math.log2;

  /** What hovering over a point says. */
  function hover({ batch, speedup, error, ms_per_token: ms, regular_ms_per_token: regular }) {
    const bar = error === null ? "" : ` ± ${number(ERRORS * error * speedup, 2)}`;
    return `batch ${batch}: ${number(speedup, 2)}×${bar}<br>${number(ms, 2)} against ${number(regular, 2)} ms a token`;
  }

  function trace(colour, line, i, count, points) {
    const look = lookOf(i), own = points.filter((one) => one.draft_length === line.draft_length && one.speedup !== null);
    const shade = colour(look.colour);
    return {
      type: "scatter", mode: "lines+markers", name: line.label, cliponaxis: false,
      x: own.map(({ batch }) => log2(batch) + APART * (i - (count - 1) / 2)), y: own.map(({ speedup }) => speedup),
      line: { color: shade, dash: look.dash, width: 2.5 }, marker: { symbol: look.symbol, size: 10, color: shade },
      error_y: {
        type: "data", visible: own.some(({ error }) => error !== null), thickness: 1.5, width: 4, color: shade,
        array: own.map(({ speedup, error }) => (error === null ? 0 : ERRORS * error * speedup)),
      },
      text: own.map(hover), hovertemplate: "%{text}<extra>%{fullData.name}</extra>",
    };
  }

  /** Where steps reach the ridge: plain ones, and those of rounds with a fixed draft length. */
  function ridges({ ridge, lines }) {
    if (ridge.tokens === null) return [];
    const fixed = lines.filter(({ draft_length: length }) => Number.isInteger(length));
    return [
      ...fixed.map(({ draft_length: length }) => ({ batch: ridge.tokens / (length + 1), text: `ridge, ${length} drafts a row` })),
      { batch: ridge.tokens, text: "ridge, plain steps" },
    ];
  }

  /** The batches of the axis: all that were asked for, and the next one if plain steps reach the ridge there. */
  function ticks({ settings, ridge }) {
    const batches = [...settings.batches], last = batches.at(-1);
    if (ridge.tokens > last && ridge.tokens <= 2 * last) batches.push(2 * last);
    return batches;
  }

  function draw(plot, sweep) {
    const colour = plots.palette(plot), axis = plots.axis(colour), batches = ticks(sweep), count = sweep.lines.length;
    const traces = sweep.lines.map((line, i) => trace(colour, line, i, count, sweep.points)).filter(({ x }) => x.length);
    const from = log2(batches[0]) - 0.5, to = log2(batches.at(-1)) + 0.35;
    const most = Math.max(1.2, ...sweep.points.map(({ speedup, error }) => (speedup ?? 0) * (1 + ERRORS * (error ?? 0))));
    const marks = ridges(sweep).filter(({ batch }) => log2(batch) > from && log2(batch) < to);
    const note = { showarrow: false, font: { size: 12, color: colour("ink") } };
    plots.react(plot, traces, plots.layout(colour, `${sweep.kind} ${batches}`, {
      height: 360, hovermode: "closest", margin: { l: 52, r: 14, t: 62, b: 42 },
      xaxis: {
        ...axis, range: [from, to], tickvals: batches.map(log2), ticktext: batches.map(String),
        title: { text: "batch size, rows", standoff: 4 },
      },
      yaxis: { ...axis, range: [0, most * 1.12], ticksuffix: "×", title: { text: "speed-up over regular", standoff: 4 } },
      shapes: !traces.length ? [] : [
        { type: "line", x0: from, x1: to, y0: 1, y1: 1, line: { color: colour("ink"), width: 1.5, dash: "dot" } },
        ...marks.map(({ batch }) => ({
          type: "line", yref: "paper", x0: log2(batch), x1: log2(batch), y0: 0, y1: 1,
          line: { color: colour("soft"), width: 1.5, dash: "longdashdot" },
        })),
      ],
      annotations: [
        { ...note, x: from, y: 1, xanchor: "left", yanchor: "bottom", text: "as fast as regular" },
        ...marks.map(({ batch, text }) => ({
          ...note, x: log2(batch), y: 1, yref: "paper", yanchor: "top", textangle: -90, xshift: 9, text,
        })),
      ],
    }), "no point yet");
  }

  window.Bass.sweepChart = draw;
})();
