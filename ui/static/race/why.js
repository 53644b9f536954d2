/* Why a race ended as it did: the paper's argument in its own rounds. Contract: means over a lane's rounds so far, without
   the prompt. "Why?" at the verdict shows the part, and the inspector on the round where the fastest lane left the
   reference: the first of its rounds that accepted a draft. */
(() => {
  "use strict";
  const { on, run, number, make, over, roundsIn, laneName, lookOf, sum, writtenIn, wear } = window.Bass;

  /** Of a lane's rounds: {ms, tokens, drafted, accepted}, the means. */
  function means({ rounds }) {
    const spent = rounds.map(({ time_ms: ms }, i) => ms - (rounds[i - 1]?.time_ms ?? 0));
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
    const { lanes, view, head: { reference, batch_size: rows } } = run(), found = means(lanes.get(name));
    if (!found) return "";
    const { ms, tokens, drafted, accepted } = found, all = rows > 1 ? ` for all ${rows} rows` : "";
    if (name === reference) return `${laneName(name)}: a step reads the whole model to write ${some(tokens)} tokens${all}, and takes ${some(ms)} ms.`;
    const checks = `checks ${some(drafted)} drafts, of which ${some(accepted)} are accepted, and writes ${some(tokens)} tokens`;
    // The verdict's number.
    const cost = view?.lanes[name]?.metrics.round_cost ?? null, steps = cost === null ? "" : `, ${number(cost, 2)} plain steps`;
    if (lookOf(name).lengths !== "row" || rows < 2) return `${laneName(name)}: a round reads it once too, ${checks}${all}: ${some(ms)} ms${steps}.`;
    return `${laneName(name)}: a round reads it for one row alone, ${checks}: ${some(ms)} ms${steps}. ${rows} rows need ${rows} such rounds.`;
  }

  window.Bass.mountWhy = (element) => {
    const part = element.querySelector(".why"), list = part.querySelector("ul");
    const draw = () => {
      const lines = [...run().lanes.keys()].map(sentence).filter(Boolean);
      list.replaceChildren(...lines.map((line) => make("li", "", wear(line.slice(0, -1)) + ".")));
      part.hidden = !lines.length;
    };
    on("start", () => (part.hidden = true));
    on("phase", (phase) => over(phase) && run() && draw());
    document.addEventListener("click", (event) => {
      if (!event.target.closest("[data-why]") || !run()) return;
      draw();
      const { view, lanes } = run(), [name] = Object.keys(view?.verdict.lanes ?? {});
      const found = [...(lanes.get(name)?.sequences ?? [])].map(roundsIn).map((steps) => steps.find(({ accepted }) => accepted > 0));
      const row = found.findIndex(Boolean);
      if (row >= 0) window.Bass.inspect(name, row, found[row]);
      part.querySelector("h2").focus({ preventScroll: true });
      part.scrollIntoView({ block: "start" });
    });
  };
})();
