/* Below the verdict: that this race's texts are exact.
   - Greedy and coupled races: how many tokens equal the reference lane's, counted from the tokens that both lanes have
     written by the playhead, e.g. "172 of 172 tokens equal to Regular's".
   - Other sampled races: the button "Same distribution?" asks the server for 1,000 draws of one token by both decoders
     (ui/race/draws.py). Its question is the position at which Regular wrote its least likely token. */
import { on, setText, tableRow, number } from "bass/page/page.js";
import { run, owed, laneName, chance, bare, sum } from "bass/race/run.js";
import { tape } from "bass/race/tape.js";

/** {lane: [equal tokens, tokens that both have written]} for the lanes whose text must equal the reference lane's. */
function equal() {
  const { race } = tape, head = run()?.head;
  if (!head || race?.head !== head || !owed(head)) return {};
  return Object.fromEntries([...race.lanes.values()].filter(({ name }) => name !== head.reference).map(({ name, rows }) => {
    const counts = rows.map((_, row) => Math.min(tape.tokensAt(name, row), tape.tokensAt(head.reference, row)));
    return [name, [sum(counts.map((count, row) => race.equal(name, row, count))), sum(counts)]];
  }));
}

/** The same in a sentence, which names the lanes only if their counts differ. */
function exactness() {
  const lanes = Object.entries(equal()).filter(([, [, both]]) => both);
  if (!lanes.length) return "";
  const whose = `equal to ${laneName(run().head.reference)}’s${tape.state.complete ? "" : " so far"}`;
  const counts = [...new Set(lanes.map(([, [same, both]]) => `${number(same, 0)} of ${number(both, 0)}`))];
  if (counts.length < 2) return `${counts[0]} tokens ${whose}`;
  return lanes.map(([name, [same, both]]) => `${laneName(name)}: ${number(same, 0)} of ${number(both, 0)} tokens`).join(", ") + ` ${whose}`;
}

/** Whether speculation may write other texts here, from the same distribution. */
const sampled = ({ head }) => head.settings.temperature > 0 && head.settings.verification !== "coupled"
  && !Number.isFinite(head.settings.acceptance) && head.lanes.includes(head.reference);

/** The position of the reference lane's least likely token, as JSON {settings, row, tokens}; "" if there is none. */
function question() {
  const { head, lanes } = run() ?? {};
  let least = null;
  (lanes?.get(head.reference)?.sequences ?? []).forEach(({ steps, tokens }, row) => {
    for (const { start, next_p: p } of steps) {
      if (start > 0 && p !== null && (least === null || p < least.p)) least = { p, row, tokens: tokens.slice(0, start).map(({ id }) => id) };
    }
  });
  return least ? JSON.stringify({ settings: head.settings, row: least.row, tokens: least.tokens }) : "";
}

export const drawsQuestion = () => [question()];

// A smaller p-value occurs by chance in one of a thousand tests.
const UNLIKELY = 0.001;

/** A test's result in words. */
const verdictOf = (name, { statistic, cells, chance: p }) =>
  `${name}: χ² = ${number(statistic, 1)} in ${cells} cells, p-value ${chance(p)}`;

class Draws {
  constructor(element, props, watch) {
    this.part = element.querySelector(".draws");
    document.addEventListener("click", (event) => event.target.closest(".verdict-draws") && this.ask());
    this.at = Object.fromEntries(["line", "before", "table", "note"].map((name) => [name, element.querySelector(`.draws-${name}`)]));
    on("start", () => this.offer());
    on("phase", () => this.offer());
    on("instant", () => this.offer());
    watch("value", () => props.value && this.show(JSON.parse(props.value)));
  }

  /** Show the button after a sampled race of this page's own model. */
  offer() {
    if (run()?.head.run !== this.asked) this.part.hidden = true;
    const offered = Boolean(run()) && run().done && sampled(run()) && !tape.state.recorded && question() !== "";
    const button = document.querySelector(".verdict-draws");
    if (button) button.hidden = !offered;
  }

  ask() {
    this.asked = run()?.head.run;
    document.querySelector("#draws-ask").click();
    this.show({ message: "", draws: null });
    this.part.scrollIntoView({ block: "center" });
  }

  show({ message, draws }) {
    // Another run may be in the lanes by now.
    if (run()?.head.run !== this.asked) return;
    this.part.hidden = false;
    setText(this.at.line, draws ? "" : message || "Drawing …");
    for (const name of ["before", "table", "note"]) this.at[name].hidden = !draws;
    if (draws) this.draw(draws);
  }

  draw({ count, before, drafter, accepted, tokens, plain, speculated }) {
    const reference = laneName(run().head.reference);
    const fits = Math.min(plain.chance, speculated.chance) >= UNLIKELY;
    setText(this.at.line, `${fits ? "Same distribution" : "Unlikely, if both draw from p: choose another seed, and try again"}. ${verdictOf(reference, plain)}. ${verdictOf("Speculation", speculated)}.`);
    setText(this.at.before, before === null ? "" : `… ${before.replace(/\s+/g, " ")} ▁`);
    this.at.table.querySelector("thead").replaceChildren(tableRow(["token", "p, the model", reference, "Speculation", "q, the draft"], true));
    this.at.table.querySelector("tbody").replaceChildren(...tokens.map(({ token, text, p, q, plain: one, speculated: two }) => {
      const name = token === null ? "all others" : bare(text ?? `${token}`);
      const row = tableRow([name, `${number(100 * p, 1)} %`, `${one}`, `${two}`, `${number(100 * q, 1)} %`]);
      [p, one / count, two / count, q].forEach((share, i) => row.children[i + 1].style.setProperty("--share", Math.min(1, share)));
      return row;
    }));
    setText(this.at.note, `${number(count, 0)} draws of this one token each, from one forward of the model and one of the draft (${drafter}). `
      + `Speculation: a draft drawn from q, tested by the code that tests a race's drafts; ${number(accepted, 0)} were accepted. The p-value is the chance of a larger χ² if a decoder draws from p.`);
  }
}

export const mountDraws = (element, props, watch) => new Draws(element, props, watch);

export const mountExact = (root) => {
  const line = root.querySelector(".verdict-exact");
  for (const kind of ["playhead", "instant", "phase"]) on(kind, () => setText(line, exactness()));
};
