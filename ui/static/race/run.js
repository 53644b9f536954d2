/* The run so far as plain objects, for other scripts and the console. Draws nothing.
   run() is null or {head, view, done, lanes: Map name -> {name, clock, sequences, rounds, trees}}.
   - A sequence is {lane, tokens, steps}, a token {origin, text, ms, id}.
   - A round is Round.record() of bass_core/sequence.py. A step is one sequence's part of a round: its row, the round's
     {round, kind, time_ms}, the row's draft length, and drafts: [{text, p, q, u, chance}].
   - trees: whether any row drafted a tree. head.together: whether the drafts of a round are tested together.
   comparison() compares each row's text with the reference lane's, in runs in which they must be equal (greedy or
   coupled): {lane: [row, ...]}. A row is null if the texts agree so far, else {at, ours, theirs, p_ours, p_theirs, tie}.
   The last snapshot contains it. For a run that was cut short it is computed here, without the probabilities. In other
   runs it is null. compared() says how each row differs up to the playhead: {lane: [a sentence, or "" if the row
   doesn't differ]}. */
import { on, number, bisect } from "bass/page/page.js";
import { tape } from "bass/race/tape.js";
import { sum } from "bass/race/times.js";

export { sum };

export const ORIGINS = { s: "sampled", a: "accepted", r: "recovered", b: "bonus" };
const OTHER = { about: "", colour: "lane-other", dash: "longdash", lengths: "" };
// The looks of all runs so far, because charts of an earlier run may be redrawn after a new one has started.
const looks = {};
let current = null;

function addTokens(sequence, tokens) {
  for (const [origin, text, ms, id] of tokens) {
    // "+": text that belongs to the previous token.
    if (origin === "+") sequence.tokens.at(-1).text += text;
    else sequence.tokens.push({ origin: ORIGINS[origin], text, ms, id });
  }
}

/** A sequence's part of a round. Getters read the row and the round, so that nothing is stored twice. */
class Step {
  constructor(row, record, length) {
    Object.assign(this, { row, record, length });
  }

  get drafts() {
    const { drafted, drafted_text: texts, p, q, u, chance } = this.row;
    return drafted.map((token, i) => ({ text: texts?.[i] ?? `${token}`, p: p[i], q: q[i], u: u[i], chance: chance[i] }));
  }
}
const PARTS = {
  row: ["sequence", "drafted", "accepted", "next_p", "parents", "path", "detail", "start", "written", "one_by_one", "certain"],
  record: ["round", "kind", "time_ms"],
};
for (const [part, names] of Object.entries(PARTS)) {
  for (const name of names) Object.defineProperty(Step.prototype, name, { get() { return this[part][name]; } });
}

function addRound(lane, record) {
  const { lengths } = record;
  lane.trees ||= record.rows.some((row) => row.parents);
  lane.rounds.push(record);
  for (const [at, row] of record.rows.entries()) {
    lane.sequences[row.sequence].steps.push(new Step(row, record, lengths[at] ?? record.draft_length));
  }
}

/** Tokens that all rows of a round wrote. */
export const writtenIn = ({ rows }) => sum(rows.map((row) => row.written));

on("start", (head) => {
  Object.assign(looks, head.looks);
  const lanes = head.lanes.map((name) => [name, {
    name, clock: 0, rounds: [], trees: false,
    sequences: Array.from({ length: head.batch_size }, () => ({ lane: name, tokens: [], steps: [] })),
  }]);
  current = { head, view: null, done: false, lanes: new Map(lanes) };
});
on("line", (line) => {
  for (const [name, update] of Object.entries(line)) {
    const lane = current.lanes.get(name);
    lane.clock = update.clock_ms;
    for (const [index, tokens] of Object.entries(update.new)) addTokens(lane.sequences[index], tokens);
    for (const round of update.rounds) addRound(lane, round);
  }
});
on("view", (view) => {
  if (current?.head.run !== view.run) return;
  current.view = view;
  current.done = view.done;
});

/** The step that wrote token `index` of a sequence, or null. */
export function stepOf({ steps }, index) {
  const step = steps[bisect(steps.length, (i) => steps[i].start <= index) - 1];
  return step && index < step.start + step.written ? step : null;
}

/** Indices of the accepted drafts, in order. */
export const pathOf = (step) => step.path ?? step.drafts.slice(0, step.accepted).map((_, i) => i);

/** Index of the draft that each draft follows, or -1 for the newest token. */
export const parentsOf = (step) => step.parents ?? step.drafts.map((_, i) => i - 1);

/** Each draft's verdict: "accepted", "rejected", or "untested" if the draft before it was not accepted. */
export function verdicts(step) {
  const path = new Set(pathOf(step));
  return parentsOf(step).map((parent, i) =>
    path.has(i) ? "accepted" : parent < 0 || path.has(parent) ? "rejected" : "untested");
}

/** The rejected drafts for the position after the accepted ones, where the target's own token was written instead. */
export function replaced(step) {
  const last = pathOf(step).at(-1) ?? -1;
  return step.drafts.filter((_, i) => parentsOf(step)[i] === last);
}

/** Indices of the sequences that finished first and last. `last` is known once all sequences have ended. If all ended
    at the same time, no sequence is first or last. */
export function firstAndLast(lane, reasons) {
  const ended = lane.sequences
    .map(({ tokens }, index) => ({ index, ms: tokens.at(-1)?.ms, reason: reasons[index] }))
    .filter(({ ms, reason }) => ms !== undefined && ["eos", "length", "stop", "grammar"].includes(reason));
  if (lane.sequences.length < 2 || !ended.length) return {};
  ended.sort((a, b) => a.ms - b.ms);
  const all = reasons.every((reason) => reason);
  if (all && ended[0].ms === ended.at(-1).ms) return {};
  return { first: ended[0].index, last: all ? ended.at(-1).index : undefined };
}

/** Whether the run is greedy without synthetic acceptance, so that no random number decides about a draft. */
export const greedy = () => current?.head.settings.temperature === 0 && coin() === null;

/** With synthetic acceptance, the chance with which each draft is accepted, or null if drafts are tested. */
export const coin = () => current?.head.settings.acceptance ?? null;

/** A text in quotes, or "(no text)" for a token without text, e.g. the end token. */
export const quoted = (text) => (text === "" ? "(no text)" : JSON.stringify(text));
/** The same without its quotes. */
export const bare = (text) => (text === "" ? quoted(text) : JSON.stringify(text).slice(1, -1));
/** A probability with three decimals, or six if it is small. */
export const chance = (value) => number(value, value > 0 && value < 0.001 ? 6 : 3);
/** The rounds of a sequence that have ended by the playhead, without its prefill. */
export function roundsIn(sequence) {
  const clock = sequence ? tape.clockAt(sequence.lane) : 0;
  return (sequence?.steps ?? []).filter(({ kind, time_ms: ms }) => kind !== "prefill" && ms <= clock);
}

/** offerLanes fills a select element with the lanes, offerRows with the numbers of `count` sequences. */
export const offerLanes = (select, names) => select.replaceChildren(...names.map((name) => new Option(laneName(name), name)));
export const offerRows = (select, count) =>
  select.replaceChildren(...Array.from({ length: count }, (_, i) => new Option(`${i + 1}`, i)));

/** The part of a lane's look that the page has before the first race. */
function template(name) {
  const section = document.getElementById(`lane-${name}`), colour = section?.style.getPropertyValue("--lane").slice("var(--".length, -1);
  return colour && { label: section.querySelector("h2").textContent, colour };
}

/** The look of a lane: {label, about, colour, dash, lengths}, see ui/race/looks.py. */
export const lookOf = (name) => looks[name] ?? { ...OTHER, label: name, ...template(name) };
export const laneName = (name) => lookOf(name).label;

// Two tokens are a near tie if the smaller score is at least this share of the larger one. For comparison: bfloat16
// logits between 16 and 32 have steps of 1/8, and exp(-1/8) is 0.88.
const NEAR = 0.7;
let cut = false;

on("phase", (phase) => (cut = phase === "stopped" || phase === "error"));

/** Whether all lanes of a run must write the same text. */
export const owed = ({ lanes, reference, settings }) => lanes.length > 1 && lanes.includes(reference)
  && !Number.isFinite(settings.acceptance) && (settings.temperature === 0 || settings.verification === "coupled");

function difference(ours, theirs) {
  const both = Math.min(ours.length, theirs.length);
  for (let at = 0; at < both; at += 1) {
    if (ours[at].id !== theirs[at].id) return { at, ours: ours[at].id, theirs: theirs[at].id };
  }
  return null;
}

export function comparison() {
  if (!current) return null;
  const { head, view, lanes } = current;
  if (view?.comparison) return view.comparison;
  if (!cut || !owed(head)) return null;
  const theirs = lanes.get(head.reference).sequences;
  const others = [...lanes.values()].filter(({ name }) => name !== head.reference);
  return Object.fromEntries(others.map(({ name, sequences }) => [
    name, sequences.map(({ tokens }, i) => difference(tokens, theirs[i].tokens)),
  ]));
}

/** Both numbers with two decimals, or as many as it takes to make them differ. */
function chances(a, b) {
  const digits = [2, 3, 4, 5, 6].find((some) => a.toFixed(some) !== b.toFixed(some));
  return digits ? `${a.toFixed(digits)} against ${b.toFixed(digits)}` : `${a.toFixed(2)} each`;
}

function differs({ at, p_ours: p, p_theirs: other, tie }, ours, theirs) {
  const where = `differs at token ${at + 1}: ${ours}, not ${theirs}`;
  if (!Number.isFinite(p) || !Number.isFinite(other)) return where;
  const dice = current.head.settings.temperature > 0 ? " after the random draw" : "";
  return `${where} (${tie >= NEAR ? `a near tie${dice}: ` : ""}${chances(p, other)})`;
}

/** How a row differs, in words, or "" if it does not yet. */
function words(lane, row, known) {
  const { race } = tape, { reference } = race.head, names = [lane, reference];
  const both = Math.min(...names.map((name) => tape.tokensAt(name, row)));
  const found = known ?? { at: race.difference(lane, row, both) };
  if (found.at < 0 || found.at >= both) return "";
  const [ours, theirs] = names.map((name) => quoted(race.textAt(name, row, found.at)));
  return differs(found, ours, theirs);
}

export function compared() {
  const head = current?.head, known = comparison();
  if (!head || tape.race?.head !== head || !current.lanes.has(head.reference) || !known && !owed(head)) return {};
  const others = head.lanes.filter((name) => name !== head.reference);
  return Object.fromEntries(others.map((name) => [
    name, current.lanes.get(name).sequences.map((_, row) => words(name, row, known?.[name]?.[row] ?? null)),
  ]));
}

export const run = () => current;
