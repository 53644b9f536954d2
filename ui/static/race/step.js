/* Step by step: one round of one row, with the code that runs it (bass_core/reference.py, see ui/race/code.py). It marks the
   line that has just run, and shows the round's values and its text up to there. trace.js has the lines.
   A round that another rule judged is shown whole, without code. While a race runs, the page is frozen, but the race goes
   on; closing the panel shows everything that came meanwhile. Arrow keys go from line to line, and on to the next round.
   bass:pause, bass:step and bass:back on the document do the same. openRound(lane, row, step) opens the panel. */
import { on, tell, setText, make, what, overlaid } from "bass/page/page.js";
import { run, roundsIn, offerLanes, offerRows, chance, bare, coin, quoted, parentsOf, pathOf, verdicts } from "bass/race/run.js";
import { tape } from "bass/race/tape.js";
import { hold, next } from "bass/race/playhead.js";
import { ruleOf, trace } from "bass/race/trace.js";

export let openRound = null;
const CONTEXT = 160, LINE_MS = 420;
const MARKS = { accepted: "✓", rejected: "✗", untested: "–", pending: "·" };
const RULES = {
  rejection: "A draft is accepted if r · q < p. The first rejected one ends the round.",
  block: "Block verification: the last draft with r < h is accepted, and all before it.",
  greedy: "Temperature 0: p and q are 1 for the most likely word and 0 for the others. Their values at temperature 1 stand below.",
  tree: "Of the drafts that follow the same token, at most one was drawn at random. It is accepted if r < min(1, p/q), the others only if the target samples them. Drafts after a rejected one are not tested.",
  coupled: "Coupled verification: a draft is accepted if the target samples the same token. There is no r, and q plays no part.",
  coin: "Synthetic acceptance: each draft is accepted at random, whatever it is.",
};

/** The rule that judged a round, in words. */
export function ruleWords(step) {
  const rule = ruleOf(step), { accepted, one_by_one: alone } = step;
  if (rule === "coin") return `${RULES.coin} Its chance is ${chance(coin())}.`;
  return rule === "block" ? `${RULES.block} Tested one by one, ${alone === accepted ? "as many" : `${alone} of them`} would have been accepted.` : RULES[rule];
}

/** All values of a round, as a state of trace.js. */
export function whole(step) {
  const count = step.drafts.length;
  return { mark: "", note: ruleWords(step), drafts: count, qs: count, p: true, tested: count, chances: count, testing: null, n: step.accepted, over: true, t: true };
}

/** The verdict on each draft in a state: "accepted", "rejected", "untested", or "pending" before it falls. */
function outcomesIn(state, step) {
  if (state.over) return verdicts(step).map((verdict) => (ruleOf(step) === "block" && verdict === "untested" ? "rejected" : verdict));
  return step.drafts.map((_, i) => (state.n !== null && i < state.n ? "accepted" : "pending"));
}

/** The table of a state: a column for each draft, a row for each variable. */
export function tableOf(state, step) {
  const table = make("table", "step-values"), { drafts, detail } = step, rule = ruleOf(step), outcomes = outcomesIn(state, step);
  const row = (name, words, known, cell, formula) => {
    const line = make("tr"), head = Object.assign(make("th"), { scope: "row" });
    head.append(make("code", "", name), words, ...(formula ? [what(formula)] : []));
    line.append(head, ...drafts.map((draft, i) =>
      make("td", `is-${outcomes[i]}${state.testing === i ? " is-now" : ""}`, i < known ? cell(draft, i) : "·")));
    table.append(line);
  };
  const q = (i) => (drafts[i].u === null && rule !== "greedy" ? null : drafts[i].q);
  row("x", "draft", state.drafts, ({ text }) => bare(text));
  if (step.parents) row("", "follows", drafts.length, (_, i) => (parentsOf(step)[i] < 0 ? "the text" : bare(drafts[parentsOf(step)[i]].text)));
  if (detail) row("", "from", state.drafts, (_, i) => detail.sources[i]);
  row("q", "draft says", state.qs, (_, i) => chance(q(i)), "q");
  row("p", "model says", state.p ? drafts.length : 0, ({ p }) => chance(p), "p");
  if (rule === "greedy" && detail) {
    row("q", "temperature 1", state.qs, (_, i) => chance(detail.own_q?.[i] ?? null));
    row("p", "temperature 1", state.p ? drafts.length : 0, (_, i) => chance(detail.own_p?.[i] ?? null));
  } else if (rule !== "greedy" && rule !== "coupled") row("r", "uniform", state.tested, ({ u }) => chance(u), "u");
  if (rule === "block") row("h", "its chance", state.chances, (draft) => chance(draft.chance), "chance");
  row("", "verdict", drafts.length, (_, i) => MARKS[outcomes[i]], "outcome");
  for (const [i, cell] of [...table.lastElementChild.children].slice(1).entries()) cell.append(make("span", "spoken", ` ${outcomes[i]}`));
  return table;
}

function cellOf(value, kind) {
  const cell = make("td", `step-share share-${kind}`, chance(value));
  cell.style.setProperty("--share", Math.min(1, value ?? 0));
  return cell;
}

/** A table of the most likely tokens where the round ended. It marks the written token and the rejected draft. */
function topOf(step, own, ending) {
  const table = make("table", "step-top"), head = make("tr"), residual = ending.mass > 0;
  const left = ending.reach < 1 ? `${chance(ending.reach)} p − q` : "p − q";
  const names = ["token", "p", ...(residual ? ["q", `(${left}) / ${chance(ending.mass)}`] : [])];
  head.append(...names.map((name) => Object.assign(make("th", "", name), { scope: "col" })));
  const rejected = ending.draft === null ? null : step.drafts[ending.draft].text;
  const rows = ending.top.map(({ token: id, text, p, q, residual: rest }) => {
    const written = id === own.id, row = make("tr", written ? `is-written from-${own.origin}` : text === rejected ? "is-refused" : "");
    const name = Object.assign(make("th", "step-name"), { scope: "row" });
    name.append(make("span", "", bare(text)), make("span", "step-mark", written ? " ← t" : text === rejected ? " ✗ x" : ""));
    row.append(name, cellOf(p, "p"), ...(residual ? [cellOf(q, "q"), cellOf(rest, "left")] : []));
    return row;
  });
  table.append(head, ...rows);
  return table;
}

/** The drafts to strike through: in a chain all after the accepted ones, in a tree only the next ones. */
function struckOf(step) {
  const path = pathOf(step), indices = step.drafts.map((_, i) => i).filter((i) => !path.includes(i));
  return step.parents ? indices.filter((i) => parentsOf(step)[i] === (path.at(-1) ?? -1)) : indices;
}

/** The newest words of the text and, after them, this round as far as the state knows it. */
function contextOf(state, step, sequence) {
  const before = sequence.tokens.slice(0, step.start).map((token) => token.text).join("");
  const written = sequence.tokens.slice(step.start, step.start + step.written), parts = [];
  if (state.over) {
    parts.push(...written.slice(0, pathOf(step).length).map(({ text }) => make("span", "token accepted", text)));
    parts.push(...struckOf(step).map((i) => make("del", "", step.drafts[i].text)));
    if (state.t) parts.push(...written.slice(pathOf(step).length).map(({ origin, text }) => make("span", `token ${origin}`, text)));
  } else {
    const accepted = state.n ?? 0;
    parts.push(...step.drafts.slice(0, state.drafts).map(({ text }, i) => make("span", i < accepted ? "token accepted" : "step-pending", text)));
  }
  return [(before.length > CONTEXT ? "… " : "") + before.slice(-CONTEXT), ...parts];
}

class Stepper {
  constructor(root) {
    this.root = root;
    this.panel = root.querySelector(".step-part");
    this.button = root.querySelector('[data-switch="stepping"]');
    this.pick = Object.fromEntries([...this.panel.querySelectorAll("[data-walk]")].map((e) => [e.dataset.walk, e]));
    this.parts = Object.fromEntries(["line", "context", "table", "ended", "note", "code"].map((name) => [name, this.panel.querySelector(`.step-${name}`)]));
    this.lines = new Map([...this.panel.querySelectorAll("[data-mark]")].map((line) => [line.dataset.mark, line]));
    Object.assign(this, { at: 0, place: 0, states: [], held: false, timer: null, wanted: null });
    this.still = window.matchMedia("(prefers-reduced-motion: reduce)");
    this.button.addEventListener("click", () => this.show(this.button.getAttribute("aria-pressed") === "true"));
    for (const name of ["lane", "sequence"]) this.pick[name].addEventListener("change", () => this.go(this.first()));
    for (const button of this.panel.querySelectorAll("[data-go]")) {
      button.addEventListener("click", () => this.walk(Number(button.dataset.go)));
    }
    for (const button of this.panel.querySelectorAll("[data-line]")) {
      button.addEventListener("click", () => this.move(Number(button.dataset.line)));
    }
    this.drafted = this.panel.querySelector("[data-drafted]");
    this.player = this.panel.querySelector("[data-run-code]");
    this.player.addEventListener("click", () => (this.timer ? this.pause() : this.play()));
    this.panel.querySelector("[data-close]").addEventListener("click", () => this.toggle());
    document.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("bass:pause", () => this.toggle());
    document.addEventListener("bass:step", () => this.move(1));
    document.addEventListener("bass:back", () => this.move(-1));
    // A run may begin while the panel is open.
    on("start", () => this.open && this.fill());
    on("phase", (phase) => this.open && phase === "waiting" && this.toggle());
    on("instant", () => this.open && !this.held && (tape.state.playing ? this.button.click() : this.go(this.at)));
    // Rounds end between two instants too.
    on("playhead", () => this.open && !this.held && !tape.state.playing && this.steps().length !== this.count && this.go(this.at));
  }

  get open() {
    return !this.panel.hidden;
  }

  toggle() {
    this.button.click();
    if (!this.open) this.button.focus({ preventScroll: true });
  }

  show(open) {
    // End the opening, which would load its next scene.
    if (open) tell("touched");
    this.panel.hidden = !open;
    this.pause();
    // A finished race needs no freezing, at any instant of it, so its slider stays usable.
    const held = open && (!(run()?.done || tape.state.ended) || tape.state.playing);
    if (held !== this.held) hold(held);
    this.held = held;
    this.mark(null);
    if (!open) return;
    this.fill();
    this.go(tape.state.complete ? this.first() : this.steps().length - 1);
  }

  /** Open the panel at a step of a row, and run its code. */
  openAt(lane, sequence, step) {
    if (!this.open) this.button.click();
    this.pick.lane.value = lane;
    this.pick.sequence.value = sequence;
    this.go(this.steps().indexOf(step));
    this.panel.scrollIntoView({ block: "nearest" });
    this.player.focus({ preventScroll: true });
    if (this.still.matches) this.set(this.states.length - 1);
    else this.play();
  }

  /** Offer the run's lanes and sequences. */
  fill() {
    const lanes = [...(run()?.lanes.values() ?? [])];
    const drafting = lanes.filter((lane) => lane.sequences.some(({ steps }) => steps.some((step) => step.drafted.length)));
    const chosen = (lanes.find(({ name }) => name === this.pick.lane.value) ?? drafting.at(-1) ?? lanes.at(-1))?.name;
    offerLanes(this.pick.lane, lanes.map(({ name }) => name));
    this.pick.lane.value = chosen ?? "";
    const row = this.pick.sequence.value || "0";
    offerRows(this.pick.sequence, lanes[0]?.sequences.length ?? 0);
    if (lanes[0]?.sequences[row]) this.pick.sequence.value = row;
  }

  get sequence() {
    return run()?.lanes.get(this.pick.lane.value)?.sequences[Number(this.pick.sequence.value)];
  }

  /** The rounds of the chosen sequence, without its prefill. */
  steps() {
    return roundsIn(this.sequence);
  }

  /** The first round with a draft. */
  first() {
    return Math.max(0, this.steps().findIndex((step) => step.drafted.length));
  }

  /** Index of the nearest later (`by` 1) or earlier (-1) round to show, or -1 if there is none. */
  near(by) {
    const steps = this.steps(), any = !this.drafted.checked || !steps.some((step) => step.drafted.length);
    let at = this.at + by;
    while (steps[at] && !any && !steps[at].drafts.length) at += by;
    return steps[at] ? at : -1;
  }

  /** Go to the next (1) or previous (-1) round. */
  walk(by) {
    if (!this.open) return this.toggle();
    // Snapshots that are held back may contain the next round.
    while (by > 0 && this.near(by) < 0 && next());
    const at = this.near(by);
    if (at >= 0) this.go(at);
    else setText(this.parts.line, `${this.progress()}: there is no ${by > 0 ? "later" : "earlier"} round${this.drafted.checked ? " with drafts" : ""}${by > 0 && !tape.state.complete ? " yet" : ""}.`);
  }

  /** Go to the next (1) or previous (-1) line, if necessary in another round. */
  move(by) {
    this.pause();
    if (this.open && this.states[this.place + by]) return this.set(this.place + by);
    const { open, at } = this;
    this.walk(by);
    if (by < 0 && open && this.at < at) this.set(this.states.length - 1);
  }

  play() {
    if (this.place === this.states.length - 1) this.walk(1);
    this.pause();
    if (this.states.length < 2) return;
    setText(this.player, "Pause");
    this.parts.note.setAttribute("aria-live", "off");
    this.timer = setInterval(() => {
      if (this.place < this.states.length - 1) this.set(this.place + 1);
      if (this.place === this.states.length - 1) this.pause();
    }, LINE_MS);
  }

  pause() {
    clearInterval(this.timer);
    this.timer = null;
    setText(this.player, "Play");
    this.parts.note.setAttribute("aria-live", "polite");
  }

  progress() {
    const steps = this.steps(), { step } = this;
    return step ? `Round ${this.at + 1} of ${steps.length}${tape.state.complete ? "" : " so far"}` : "No round yet";
  }

  /** Show the first line of a round. */
  go(at) {
    const steps = this.steps();
    this.pause();
    this.at = Math.max(0, Math.min(at, steps.length - 1));
    this.count = steps.length;
    const step = this.step = steps[this.at];
    this.panel.classList.toggle("empty", !step);
    this.mark(step);
    this.states = [];
    if (!step) return setText(this.parts.line, "No round yet: press Run.");
    const { drafts, accepted, written, start } = step, count = drafts.length, rule = ruleOf(step);
    this.own = written > pathOf(step).length ? this.sequence.tokens[start + written - 1] : null;
    const traced = trace(step, this.own);
    this.states = traced ?? [whole(step)];
    this.panel.classList.toggle("no-code", !traced);
    for (const part of this.parts.code.querySelectorAll("[data-function]")) {
      part.hidden = !this.states.some(({ mark }) => mark.startsWith(`${part.dataset.function}.`));
    }
    this.panel.querySelector(".step-rule").textContent = count && traced ? RULES[rule] : "";
    const words = `${count} ${count === 1 ? "draft" : "drafts"}, ${accepted} accepted`;
    setText(this.parts.line, `${this.progress()}: ${count ? words : "nothing drafted"}.`);
    this.set(0);
  }

  /** Show the state after a line of the round. */
  set(place) {
    this.place = place;
    const state = this.states[place], { step } = this, ending = step.detail?.ending, line = this.lines.get(state.mark);
    this.parts.context.replaceChildren(...contextOf(state, step, this.sequence));
    this.parts.table.replaceChildren(...(step.drafts.length ? [tableOf(state, step)] : []));
    this.follow(state);
    const outcome = [["n", state.n], ["t", state.t ? (this.own ? quoted(this.own.text) : "none") : null]];
    this.parts.ended.replaceChildren(...outcome.map(([name, value]) => {
      const item = make("span");
      item.append(make("code", "", name), ` ${value ?? "·"}`);
      return item;
    }));
    if (state.t && this.own && ending) this.parts.ended.append(topOf(step, this.own, ending));
    setText(this.parts.note, state.note);
    this.panel.querySelector(".code-now")?.removeAttribute("aria-current");
    this.panel.querySelector(".code-now")?.classList.remove("code-now");
    if (!line) return;
    line.classList.add("code-now");
    line.setAttribute("aria-current", "step");
    // Scroll only the code, never the page.
    const { code } = this.parts, box = code.firstElementChild;
    box.scrollTop = line.offsetTop - (box.clientHeight - line.offsetHeight) / 2;
  }

  /** Scroll the table to the draft that the line works on. */
  follow({ testing, drafts, over }) {
    const { table } = this.parts, at = over ? 0 : testing ?? Math.max(0, drafts - 1);
    const cell = table.querySelector("tr")?.cells[at + 1];
    if (cell) table.scrollLeft = cell.offsetLeft + cell.offsetWidth - table.clientWidth;
  }

  /** Outline the round's tokens in the lane's text and dim the later ones. null undoes it. */
  mark(step) {
    for (const span of this.root.querySelectorAll(".token.stepped, .token.later")) span.classList.remove("stepped", "later");
    if (!step) return;
    const { lane, sequence } = Object.fromEntries(Object.entries(this.pick).map(([name, { value }]) => [name, value]));
    const text = this.root.querySelector(`[id="lane-${lane}"] .sequence[data-sequence="${sequence}"]`);
    const end = step.start + step.written;
    const spans = [...(text?.querySelectorAll(".token") ?? [])];
    for (const span of spans) {
      span.classList.toggle("stepped", span.token >= step.start && span.token < end);
      span.classList.toggle("later", span.token >= end);
    }
    const here = spans.find((span) => span.classList.contains("stepped")), box = text?.closest(".window");
    // Scroll only the text, never the page.
    if (here) box.scrollTop += here.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2;
  }

  key(event) {
    const end = this.states.length - 1;
    const act = {
      ArrowRight: () => this.move(1), ArrowLeft: () => this.move(-1), Home: () => this.set(0), End: () => this.set(end), Escape: () => this.toggle(),
    }[event.key];
    const ours = this.panel.contains(event.target) || event.target === document.body || event.target === this.button;
    if (event.defaultPrevented || !this.open || !act || !ours || event.target.matches("select, input") || event.ctrlKey || event.altKey || event.metaKey) return;
    if (event.key === "Escape" && overlaid()) return;
    if (end < 0 && ["Home", "End"].includes(event.key)) return;
    event.preventDefault();
    this.pause();
    act();
  }
}

// The recording whose rounds show the rule best: sampled, with drafts that are often rejected.
const SAMPLED = "loss";

/** The first round of a recording's last lane that accepted some drafts and rejected others, as [lane, row, step]. */
function mixedRound() {
  const lane = [...run().lanes.values()].at(-1);
  const mixed = (step) => step.accepted > 1 && step.accepted < step.drafts.length;
  const row = lane.sequences.findIndex((sequence) => roundsIn(sequence).some(mixed));
  return row < 0 ? null : [lane.name, row, roundsIn(lane.sequences[row]).find(mixed)];
}

/** Open a round of the sampled recording in the tab "Race". */
async function openRecorded() {
  document.querySelector("#tabs [role=tab]")?.click();
  document.querySelector(`[data-recording="${SAMPLED}"]`)?.click();
  const loaded = () => tape.state.recorded?.name === SAMPLED && run();
  for (let i = 0; i < 200 && !loaded(); i += 1) await new Promise((resolve) => setTimeout(resolve, 50));
  if (!loaded()) return;
  tape.live();
  const round = mixedRound();
  if (round) openRound(...round);
}

document.addEventListener("click", (event) => event.target.closest("[data-real-round]") && openRecorded());

export const mountStepper = (root) => {
  const stepper = new Stepper(root);
  openRound = (lane, sequence, step) => stepper.openAt(lane, sequence, step);
};
