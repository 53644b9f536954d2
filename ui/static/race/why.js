/* "Why": the paper's argument, with the numbers of this race. All are means over a lane's rounds up to the
   playhead, without the prefill. The button "Why?" next to the verdict opens this part, and opens the inspector at the round in which the
   fastest lane first gained on the reference: the first one that accepted a draft. */
import { on, number, make, bisect, setText, soon, whole } from "bass/page/page.js";
import { run, roundsIn, laneName, lookOf, sum, writtenIn } from "bass/race/run.js";
import { wear } from "bass/race/predicted.js";
import { tape } from "bass/race/tape.js";
import { OFTEN, guessing, narrator } from "bass/race/narrate.js";
import { pickRound } from "bass/race/inspector.js";

// A round that costs less than so many plain steps is almost free.
const CHEAP = 1.35;
// For each lane, a list of the sums up to each of its rounds. Prefills add nothing.
const totals = new WeakMap();

function totalsOf(lane) {
  if (!totals.has(lane)) totals.set(lane, []);
  const known = totals.get(lane), { rounds } = lane;
  for (let i = known.length; i < rounds.length; i += 1) {
    const before = known[i - 1] ?? { count: 0, ms: 0, tokens: 0, drafted: 0, accepted: 0 }, { kind, rows, time_ms: ms } = rounds[i];
    known.push(kind === "prefill" ? before : {
      count: before.count + 1, ms: before.ms + ms - (rounds[i - 1]?.time_ms ?? 0), tokens: before.tokens + writtenIn(rounds[i]),
      drafted: before.drafted + sum(rows.map((row) => row.drafted.length)), accepted: before.accepted + sum(rows.map((row) => row.accepted)),
    });
  }
  return known;
}

/** The means over a lane's rounds: {ms, tokens, drafted, accepted}, or null without rounds. */
function means(lane) {
  const clock = tape.clockAt(lane.name), known = totalsOf(lane), { rounds } = lane;
  const { count, ...sums } = known[bisect(rounds.length, (i) => rounds[i].time_ms <= clock) - 1] ?? { count: 0 };
  return count ? Object.fromEntries(Object.entries(sums).map(([name, value]) => [name, value / count])) : null;
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

/** What verifying costs in this race, compared with a plain step. */
function price(cost) {
  if (cost === null) return "";
  const steps = `${number(cost, 2)} plain steps`;
  if (cost < CHEAP) return `Here reading took longer than multiplying, so a step verified all drafts almost for free: for ${steps}.`;
  return `Here multiplying took time too: verifying the drafts cost as much as ${steps}, which they had to earn back.`;
}

export const mountWhy = (element) => {
  const part = element.querySelector(".why"), list = part.querySelector("ul");
  const draw = () => {
    const told = narrator(tape.race), lane = told && guessing(told) >= OFTEN * told.rounds.length ? run().view?.lanes[told.name] : null;
    const words = price(lane?.metrics.round_cost ?? null);
    setText(part.querySelector(".why-cost"), words && `${wear(words.slice(0, -1))}.`);
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
  whole(() => run() && show());
  for (const kind of ["view", "playhead"]) on(kind, () => run() && run().head === shown && soon(draw));
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-why]") || !run()) return;
    show();
    const { view, lanes } = run(), [name] = Object.keys(view?.verdict.lanes ?? {});
    const accepting = [...(lanes.get(name)?.sequences ?? [])].map(roundsIn).map((steps) => steps.find(({ accepted }) => accepted > 0));
    const row = accepting.findIndex(Boolean);
    if (row >= 0) pickRound(name, row, accepting[row]);
    part.querySelector("h2").focus({ preventScroll: true });
    part.scrollIntoView({ block: "start" });
  });
};
