/* The tip that explains a token: where it came from and why. It opens on hover, or with the arrow keys in a sequence's
   window. A click or Enter opens the step inspector. */
import { number, setText, make } from "bass/page/page.js";
import { run, stepOf, pathOf, replaced, chance, quoted, greedy, coin } from "bass/race/run.js";
import { wear } from "bass/race/predicted.js";
import { inspect } from "bass/race/inspector.js";

/** Whether a step's drafts were tested together, by block verification. */
const together = (step) => run().head.together && !step.parents;

/** The limit for u, in words. */
const limit = ({ p, q, chance: h }, step) => (together(step) ? `h ${chance(h)}` : `p/q ${chance(p / q)}`);

/** Why a draft was accepted. */
function accepted(draft, step) {
  if (step.certain) return "certain: the schema or grammar allows no other token here; checked like a guess";
  if (greedy()) return "accepted: it is the target's most likely token";
  if (coin() !== null) return `accepted at random: u ${chance(draft.u)} < ${chance(coin())}`;
  if (draft.u === null) return "accepted: the target samples the same token";
  if (together(step) && draft.u >= draft.chance) return "accepted: a later draft has u < h";
  return `accepted: u ${chance(draft.u)} < ${limit(draft, step)}`;
}

/** Why the target wrote its own token at temperature 0. */
function mostLikely(token, step) {
  if (token.origin === "recovered") return `the target's most likely token, which replaces ${replaced(step).map(({ text }) => quoted(text)).join(", ")}`;
  return `the target's most likely token${token.origin === "bonus" ? ", after drafts that were all accepted" : ": nothing was drafted"}`;
}

/** Why the target wrote its own token. */
function drawn(token, step) {
  if (greedy()) return mostLikely(token, step);
  if (token.origin === "bonus") return `sampled from the target, after all ${step.accepted} drafts${step.parents ? " of a branch" : ""} were accepted`;
  if (token.origin !== "recovered") return "sampled from the target: nothing was drafted";
  const drafts = replaced(step), [draft] = drafts;
  if (coin() !== null) return `replaces ${quoted(draft.text)}, rejected at random: u ${chance(draft.u)} ≥ ${chance(coin())}`;
  if (drafts.length > 1) return `replaces ${drafts.map(({ text }) => quoted(text)).join(", ")}, all rejected`;
  return `replaces ${quoted(draft.text)}, rejected: p ${chance(draft.p)}, q ${chance(draft.q)}` +
    (draft.u === null ? ": the target samples another token" : `, u ${chance(draft.u)} ≥ ${limit(draft, step)}`);
}

/** Lines that explain a token: its origin and time, its place, its numbers, the reason. */
function explain(sequence, index) {
  const token = sequence.tokens[index], step = stepOf(sequence, index);
  const lines = [`${quoted(token.text)}: ${token.origin}, token ${index + 1}, ${wear(`at ${number(token.ms, 0)} ms of lane time`)}`];
  if (!step) return lines;
  if (step.kind === "prefill") return [...lines, "The first token comes from the prefill, which reads the prompt."];
  const at = index - step.start, count = step.drafts.length;
  lines.push(`round ${step.round}, position ${at + 1}` + (count ? ` (${count} drafted${step.parents ? " as a tree" : ""})` : ""));
  if (token.origin === "accepted") {
    const draft = step.drafts[pathOf(step)[at] ?? at];
    if (!greedy() && coin() === null) lines.push(`p(x) ${chance(draft.p)}, q(x) ${chance(draft.q)}`);
    lines.push(accepted(draft, step));
    if (together(step) && at >= step.one_by_one) lines.push("saved: if the drafts had been tested one by one, the round would have ended before this one");
  } else {
    if (!greedy() && coin() === null) lines.push(`p(x) ${chance(step.next_p)}, q(x) n/a: it was not drafted`);
    lines.push(drawn(token, step));
  }
  return lines;
}

class Tips {
  constructor(board) {
    this.tip = board.querySelector(".token-tip");
    this.spoken = board.querySelector(".board-spoken");
    this.chosen = null;
    board.addEventListener("pointerover", (event) => {
      const span = event.target.closest?.(".sequence .token");
      if (span) this.show(span);
      else this.hide();
    });
    board.addEventListener("pointerleave", () => this.hide());
    board.addEventListener("click", (event) => {
      const span = event.target.closest?.(".sequence .token");
      if (span && window.getSelection().isCollapsed) this.inspect(span);
    });
    board.addEventListener("keydown", (event) => this.key(event));
    board.addEventListener("focusout", () => this.hide());
    window.addEventListener("scroll", () => this.chosen || this.hide(), { passive: true });
  }

  static of(span) {
    const { lane, sequence } = span.closest(".sequence").dataset;
    return { lane, sequence: Number(sequence), index: span.token };
  }

  show(span) {
    const { lane, sequence, index } = Tips.of(span);
    const row = run()?.lanes.get(lane)?.sequences[sequence];
    if (!row || !row.tokens[index]) return null;
    const lines = explain(row, index);
    this.tip.replaceChildren(...lines.map((line) => make("p", "", line)));
    this.tip.hidden = false;
    const box = span.getClientRects()[0] ?? span.getBoundingClientRect(), own = this.tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - own.width - 8));
    const above = box.top - own.height - 6;
    // Texts move under a resting pointer. Moving the tip with them by its edges would count as a shift of the layout.
    this.tip.style.translate = `${left}px ${above > 4 ? above : box.bottom + 6}px`;
    return lines;
  }

  hide() {
    this.tip.hidden = true;
    this.chosen?.classList.remove("chosen");
    this.chosen = null;
  }

  inspect(span) {
    const { lane, sequence, index } = Tips.of(span);
    const step = stepOf(run().lanes.get(lane).sequences[sequence], index);
    if (step) inspect?.(lane, sequence, step);
  }

  /** Arrow keys move through the tokens of the window that has the focus. */
  key(event) {
    const text = event.target.closest?.(".window")?.querySelector(".sequence");
    if (!text) return;
    const spans = [...text.querySelectorAll(".token")].filter((span) => span.textContent !== "");
    const now = spans.indexOf(this.chosen), end = spans.length - 1;
    const next = {
      ArrowRight: Math.min(now + 1, end), ArrowLeft: now < 0 ? end : Math.max(now - 1, 0), Home: 0, End: end,
    }[event.key];
    if (event.key === "Escape") this.hide();
    else if (event.key === "Enter" && this.chosen) this.inspect(this.chosen);
    else if (next !== undefined && spans[next]) {
      this.hide();
      this.chosen = spans[next];
      this.chosen.classList.add("chosen");
      this.chosen.scrollIntoView({ block: "nearest" });
      setText(this.spoken, (this.show(this.chosen) ?? []).join(". "));
    } else return;
    event.preventDefault();
  }
}

export const mountTips = (board) => new Tips(board);
