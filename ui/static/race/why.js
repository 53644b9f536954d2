/* "Why": the paper's argument, with the numbers of this race. All are means over a lane's rounds up to the
   playhead, without the prefill. The button "Why?" next to the verdict opens this part, and opens the inspector at the round in which the
   fastest lane first gained on the reference: the first one that accepted a draft. */
(() => {
  "use strict";
  const { on, run, number, make, over, roundsIn, laneName, lookOf, sum, writtenIn, wear, tape, soon } = window.Bass;

  /** The means over a lane's rounds: {ms, tokens, drafted, accepted}, or null without rounds. */
  function means({ name, rounds: all }) {
    const clock = tape.clockAt(name), rounds = all.filter(({ time_ms: ms }) => ms <= clock), spent = rounds.map(({ time_ms: ms }, i) => ms - (rounds[i - 1]?.time_ms ?? 0));
    const counted = rounds.map((round, i) => ({ round, ms: spent[i] })).filter(({ round }) => round.kind !== "prefill");
    const mean = (value) => sum(counted.map(value)) / counted.length;
    const rows = (value) => mean(({ round }) => sum(round.rows.map(value)));
    return counted.length ? {
      ms: mean(({ ms }) => ms), tokens: mean(({ round }) => writtenIn(round)),
      drafted: rows((row) => row.drafted.length), accepted: rows((row) => row.accepted),
    } : null;
  }

  const some = (value) => number(value, value < 10 ? 1 : 0);

  function sentence(name) {
    const { lanes, view, head: { reference, batch_size: rows } } = run(), averages = means(lanes.get(name));
    if (!averages) return "";
    const { ms, tokens, drafted, accepted } = averages, all = rows > 1 ? ` for all ${rows} rows` : "";
    if (name === reference) return `${laneName(name)}: a step reads the whole model to write ${some(tokens)} tokens${all}, and takes ${some(ms)} ms.`;
    const verifies = `verifies ${some(drafted)} drafts, accepts ${some(accepted)} of them, and writes ${some(tokens)} tokens`;
    // The same number as in the verdict.
    const cost = view?.lanes[name]?.metrics.round_cost ?? null, steps = cost === null ? "" : `, as long as ${number(cost, 2)} plain steps`;
    if (lookOf(name).lengths !== "row" || rows < 2) return `${laneName(name)}: a round also reads the whole model once, ${verifies}${all}. It takes ${some(ms)} ms${steps}.`;
    return `${laneName(name)}: a round reads the whole model for one row only, ${verifies}. It takes ${some(ms)} ms${steps}, and ${rows} rows need ${rows} such rounds.`;
  }

  window.Bass.mountWhy = (element) => {
    const part = element.querySelector(".why"), list = part.querySelector("ul");
    const draw = () => {
      const lines = [...run().lanes.keys()].map(sentence).filter(Boolean);
      list.replaceChildren(...lines.map((line) => make("li", "", wear(line.slice(0, -1)) + ".")));
      part.hidden = !lines.length;
    };
    // The run whose means are shown.
    let shown = null;
    const show = () => {
      shown = run().head;
      draw();
    };
    on("start", (head) => {
      if (head !== shown) part.hidden = true;
    });
    on("phase", (phase) => over(phase) && run() && show());
    for (const kind of ["view", "playhead"]) on(kind, () => run() && run().head === shown && soon(draw));
    document.addEventListener("click", (event) => {
      if (!event.target.closest("[data-why]") || !run()) return;
      show();
      const { view, lanes } = run(), [name] = Object.keys(view?.verdict.lanes ?? {});
      const accepting = [...(lanes.get(name)?.sequences ?? [])].map(roundsIn).map((steps) => steps.find(({ accepted }) => accepted > 0));
      const row = accepting.findIndex(Boolean);
      if (row >= 0) window.Bass.pickRound(name, row, accepting[row]);
      part.querySelector("h2").focus({ preventScroll: true });
      part.scrollIntoView({ block: "start" });
    });
  };
})();
