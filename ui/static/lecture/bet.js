/* "Bet first": before a race, the visitor says which lane will finish first. Afterwards a line compares that with the verdict.
   - The mode is on in presenter mode, and can be switched on and off by the switch "Bet first".
   - While it is on, Run asks the question instead of starting. A lane's button or its key (a, b, c, ...) starts the race.
     Escape, or Run again, starts it without a bet. A touch of the race in the lanes, or of a recording, ends the question.
   - The outcome is that of the verdict's first sentence (ui/race/verdict.py), so it needs no server. */
import { on, make, setText, busy, over, soon, overlaid } from "bass/page/page.js";
import { run, lookOf } from "bass/race/run.js";

const FIELDS = "input, textarea, select, [contenteditable]:not([contenteditable='false']), [role='textbox']";
// "BASS was fastest: 2.08× the speed of Regular, ..." or "BASS and Speculative were level, ...", or as older versions wrote it.
const FASTEST = /^(.+?) (?:was fastest|is ahead): ([\d.]+×)/, LEVEL = /^(.+?) (?:were|are) level/;

/** The outcome in words, from the first sentence of a verdict, or "" if it names no lane. */
function outcome(head) {
  const fastest = FASTEST.exec(head ?? ""), level = LEVEL.exec(head ?? "");
  return fastest ? `Fastest: ${fastest[1]}, ${fastest[2]}` : level ? `${level[1]} were level` : "";
}

class Bet {
  constructor(board) {
    this.board = board;
    this.verdict = board.querySelector(".verdict");
    this.part = make("section", "bet");
    this.part.hidden = true;
    this.part.setAttribute("aria-label", "Your bet");
    this.question = make("p", "", "Which finishes first, and by how much?");
    this.list = make("div", "bet-lanes");
    this.part.append(this.question, this.list);
    this.line = make("p", "bet-line");
    this.line.setAttribute("role", "status");
    this.verdict.before(this.part);
    this.verdict.append(this.line);
    this.switch = make("button", "switch", "Bet first");
    Object.assign(this.switch, { type: "button", title: "Ask before each race which lane will finish first" });
    this.switch.addEventListener("click", () => this.set(!this.wanted));
    board.querySelector(".switches").append(this.switch);
    this.lanes = null;
    this.said = null;
    this.chosen = null;
    this.presented();
    new MutationObserver(() => this.presented()).observe(document.body, { attributes: true, attributeFilter: ["class"] });
    on("form", ({ lanes }) => (this.lanes = lanes));
    on("phase", (phase) => this.phase(phase));
    on("start", (head) => this.start(head));
    on("touched", () => this.open && this.close());
    for (const kind of ["view", "instant"]) on(kind, () => soon(() => this.compare()));
    document.addEventListener("click", (event) => this.hold(event), true);
    document.addEventListener("keydown", (event) => this.key(event), true);
  }

  set(wanted) {
    this.wanted = wanted;
    this.switch.setAttribute("aria-pressed", String(wanted));
    if (!wanted) this.close();
  }

  presented() {
    const { classList } = document.body, presenting = classList.contains("presenting");
    if (presenting === this.presenting || classList.contains("printing")) return;
    this.presenting = presenting;
    this.set(presenting);
  }

  get open() {
    return !this.part.hidden;
  }

  /** Ask instead of starting a race. */
  hold(event) {
    if (!this.wanted || this.open || this.chosen !== null || busy(this.now)) return;
    if (!event.target.closest?.("#run:not([disabled])")) return;
    event.preventDefault();
    event.stopImmediatePropagation();
    this.ask();
  }

  ask() {
    const lanes = [...this.board.querySelectorAll(".lane")].map(({ dataset }) => dataset.lane);
    const names = this.lanes?.length ? this.lanes : lanes;
    this.list.replaceChildren(...names.map((name, i) => {
      const button = make("button", "bet-lane"), key = String.fromCharCode(97 + i);
      const { label, colour } = lookOf(name);
      button.type = "button";
      button.dataset.key = key;
      button.dataset.bet = name;
      button.style.setProperty("--lane", `var(--${colour})`);
      button.append(make("kbd", "", key), label);
      button.addEventListener("click", () => this.choose(label));
      return button;
    }));
    this.show(true);
    this.part.scrollIntoView({ block: "nearest" });
    this.list.firstElementChild?.focus({ preventScroll: true });
  }

  /** Start the race with this bet, or without one. */
  choose(label) {
    this.chosen = label;
    this.close();
    document.querySelector("#run")?.click();
    if (label === "") this.chosen = null;
  }

  close() {
    this.show(false);
  }

  /** Ask, or don't. While it asks, the board hides the last race's answer. */
  show(asks) {
    this.part.hidden = !asks;
    this.verdict.hidden = asks;
    this.board.classList.toggle("asks", asks);
  }

  key(event) {
    if (!this.open || event.ctrlKey || event.altKey || event.metaKey || event.isComposing) return;
    if (event.target.closest?.(FIELDS) || event.key === "Escape" && overlaid()) return;
    // Without the page's keys, only the question itself takes some while it has the focus (WCAG 2.1.4).
    if (new URLSearchParams(location.search).get("keys") === "off" && !this.part.contains(event.target)) return;
    const button = this.list.querySelector(`[data-key="${CSS.escape(event.key.toLowerCase())}"]`);
    if (!button && event.key !== "Escape") return;
    event.preventDefault();
    event.stopImmediatePropagation();
    if (button) button.click();
    else this.choose("");
  }

  phase(phase) {
    this.now = phase;
    if (busy(phase)) this.close();
    // The race was refused, or stopped before it began.
    else if (over(phase)) this.chosen = null;
  }

  /** The bet belongs to this run. A recording that plays by itself has none. */
  start({ run: name }) {
    if (this.chosen !== null) this.said = { label: this.chosen, run: name };
    // A start of the same run is a jump back in it.
    else if (this.said?.run !== name) this.said = null;
    this.chosen = null;
    setText(this.line, "");
  }

  compare() {
    const { view, head } = run() ?? {};
    const words = view?.done && this.said?.run === head.run ? outcome(view.verdict.head) : "";
    setText(this.line, words && `You said ${this.said.label}. ${words}.`);
  }
}

export const mountBet = (element) => new Bet(element.querySelector(".bass-lanes"));
