/* Step by step: walks through the rounds of a lane. Shows the drafts and who proposed them, the test of each draft, and
   the end of the round with p, q and the residual. While the panel is open, the page is frozen but the race continues.
   Closing the panel shows everything that came meanwhile. All numbers of a round are in the document at once; only CSS
   makes them appear one after the other, so nothing waits for an animation that is switched off. "Next round" first
   completes a running animation. The events bass:pause, bass:step and bass:back on the document act like the buttons. */
(() => {
  "use strict";
  const {
    on, hold, next, run, setText, make, roundsIn, offerLanes, offerRows, chance, bare, quoted, greedy, parentsOf, pathOf,
    verdicts,
  } = window.Bass;
  const CONTEXT = 160;
  // Times of the animation in ms: between two drafts, between two tests, the maximum for all tests, the final draw.
  const APPEAR = 120, TEST = 700, TESTS = 4200, DRAW = 900;
  const MARKS = { accepted: "✓", rejected: "✗", untested: "–" };

  /** The rule (a key of RULES) that decided a round. Recordings without details don't name it, so it is inferred. */
  function ruleOf(step) {
    if (step.detail) return step.detail.rule;
    if (greedy()) return "greedy";
    if (step.drafts.every((draft) => draft.u === null)) return "coupled";
    return step.parents ? "tree" : run().head.together ? "block" : "rejection";
  }

  const RULES = {
    rejection: "Rejection sampling: a draft is accepted if u < min(1, p/q). The first rejected draft ends the round.",
    block: "Block verification: the last draft with u < h is accepted, and so are all drafts before it. h weighs a row's drafts together.",
    tree: "Of the drafts that follow the same token, at most one was drawn at random. It is accepted if u < min(1, p/q), the others only if the target samples them.",
    coupled: "Coupled verification: a draft is accepted if the target samples the same token. There is no u, and q plays no part.",
    greedy: "Temperature 0: a draft is accepted if it is the target's most likely token. Nothing is drawn. p and q are shown at temperature 1.",
    coin: "Synthetic acceptance: each draft is accepted at random, whatever it is.",
  };

  /** The verdict on each draft. Block verification decides on all drafts of a row, so it leaves none untested. */
  function judged(step, rule) {
    const outcomes = verdicts(step);
    return rule === "block" ? outcomes.map((verdict) => (verdict === "untested" ? "rejected" : verdict)) : outcomes;
  }

  /** The test of a draft as {share: length of the bar, u, words}. */
  function testOf(step, i, rule, verdict) {
    const draft = step.drafts[i], { detail } = step, isAccepted = verdict === "accepted";
    if (verdict === "untested") return { share: null, u: null, words: "not tested" };
    if (rule === "greedy") {
      return { share: detail?.own_p?.[i] ?? null, u: null, words: isAccepted ? "most likely token" : "not the most likely token" };
    }
    if (rule === "coupled" || draft.u === null) {
      return { share: draft.p, u: null, words: isAccepted ? "the target samples it" : "the target samples another token" };
    }
    const limit = draft.chance ?? (draft.q > 0 ? Math.min(1, draft.p / draft.q) : null);
    const sign = draft.u < limit ? "<" : "≥";
    const late = isAccepted && sign === "≥" ? ", but a later draft has u < h" : "";
    const name = rule === "block" ? "h " : "";
    return { share: limit, u: draft.u, words: `u ${chance(draft.u)} ${sign} ${name}${chance(limit)}${late}` };
  }

  /** The probabilities of draft `i` that the rule uses, in words. */
  function numbersOf(step, i, rule) {
    const draft = step.drafts[i], { detail } = step;
    if (rule === "greedy") return `p ${chance(detail?.own_p?.[i] ?? null)} · q ${chance(detail?.own_q?.[i] ?? null)}`;
    if (rule === "coin") return `chance ${chance(draft.chance ?? draft.p)}`;
    if (rule === "coupled") return `p ${chance(draft.p)}`;
    return `p ${chance(draft.p)} · q ${chance(draft.u === null ? null : draft.q)}`;
  }

  function cardOf(step, i, rule, verdict, per) {
    const card = make("li", `step-draft is-${verdict}`);
    card.style.setProperty("--appear", `${i * APPEAR}ms`);
    card.style.setProperty("--test", `${step.drafted.length * APPEAR + i * per}ms`);
    const { share, u, words } = testOf(step, i, rule, verdict), parent = parentsOf(step)[i];
    const token = make("p", "step-token", bare(step.drafts[i].text));
    const source = step.detail?.sources[i];
    const after = step.parents ? `after ${parent < 0 ? "the text" : quoted(step.drafts[parent].text)}` : "";
    const from = make("p", "step-source", [source, after].filter(Boolean).join(", "));
    const bar = make("div", "step-bar");
    bar.setAttribute("aria-hidden", "true");
    if (share !== null) {
      const fill = make("i", "step-fill");
      fill.style.setProperty("--share", Math.min(1, share));
      bar.append(fill);
    }
    if (u !== null) {
      const ball = make("i", u > 0.85 ? "step-u at-right" : "step-u", "u");
      ball.style.setProperty("--at", u);
      bar.append(ball);
    }
    card.append(token, from, bar, make("p", "step-numbers", numbersOf(step, i, rule)),
      make("p", "step-verdict", `${MARKS[verdict]} ${verdict === "untested" ? words : `${verdict}: ${words}`}`));
    return card;
  }

  /** The end of a round in a sentence. */
  function endingLine(step, rule, own, ending) {
    const word = own ? quoted(own.text) : "";
    if (step.written === pathOf(step).length || own?.origin === "accepted") return "The round ended with an accepted draft.";
    if (!ending) return `Then the target wrote ${word} (${own.origin}).`;
    if (ending.mass !== null) {
      const p = ending.reach < 1 ? `${chance(ending.reach)} p` : "p";
      if (!ending.mass) return `Then ${word} (${own.origin}) replaces the rejected draft, drawn from p, because p and q are almost equal here.`;
      return `Then ${word} (${own.origin}) replaces the rejected draft, drawn from the residual max(0, ${p} − q) / ${chance(ending.mass)}.`;
    }
    const written = `Then ${word} (${own.origin})`;
    if (rule === "greedy") return `${written}, the target's most likely token.`;
    if (rule === "coupled") return `${written}, which the target sampled from p.`;
    return `${written}, drawn from p${ending.draft === null ? ": no draft is left to test" : ""}.`;
  }

  function cellOf(value, kind) {
    const cell = make("td", `step-share share-${kind}`, chance(value));
    cell.style.setProperty("--share", Math.min(1, value ?? 0));
    return cell;
  }

  /** A table of the most likely tokens where the round ended. It marks the written token and the rejected draft. */
  function topOf(step, own, ending) {
    const table = make("table", "step-top"), head = make("tr"), residual = ending.mass > 0;
    const names = ["token", "p", ...(residual ? ["q", "residual"] : [])];
    head.append(...names.map((name) => Object.assign(make("th", "", name), { scope: "col" })));
    const rejected = ending.draft === null ? null : step.drafts[ending.draft].text;
    const rows = ending.top.map(({ token: id, text, p, q, residual: left }) => {
      const written = id === own.id, row = make("tr", written ? `is-written from-${own.origin}` : text === rejected ? "is-refused" : "");
      const name = Object.assign(make("th", "step-name"), { scope: "row" });
      name.append(make("span", "", bare(text)), make("span", "step-mark", written ? " ← written" : text === rejected ? " ✗ draft" : ""));
      row.append(name, cellOf(p, "p"), ...(residual ? [cellOf(q, "q"), cellOf(left, "left")] : []));
      return row;
    });
    table.append(head, ...rows);
    return table;
  }

  /** The drafts to strike through: in a chain all after the accepted ones, in a tree only the next ones. */
  function struckOf(step, outcomes) {
    const indices = step.drafts.map((_, i) => i).filter((i) => outcomes[i] !== "accepted");
    return step.parents ? indices.filter((i) => parentsOf(step)[i] === (pathOf(step).at(-1) ?? -1)) : indices;
  }

  /** Draw a step of a sequence into the panel. Returns the duration of the animation in ms. */
  function drawStep(panel, step, sequence) {
    const rule = ruleOf(step), outcomes = judged(step, rule), count = step.drafted.length;
    const per = Math.min(TEST, TESTS / Math.max(1, count)), tests = count * (APPEAR + per);
    const own = sequence.tokens[step.start + step.written - 1], { detail } = step;
    const before = sequence.tokens.slice(0, step.start).map((token) => token.text).join("");
    const written = sequence.tokens.slice(step.start, step.start + step.written).map((token, i) => {
      const span = make("span", `token ${token.origin}`, token.text);
      span.style.setProperty("--test", `${token.origin === "accepted" ? count * APPEAR + i * per : tests + DRAW}ms`);
      return span;
    });
    const struck = struckOf(step, outcomes).map((i) => {
      const del = make("del", `is-${outcomes[i]}`, step.drafts[i].text);
      del.style.setProperty("--test", `${i * APPEAR}ms`);
      return del;
    });
    written.splice(pathOf(step).length, 0, ...struck);
    panel.querySelector(".step-context").replaceChildren((before.length > CONTEXT ? "… " : "") + before.slice(-CONTEXT), ...written);
    setText(panel.querySelector(".step-rule"), count ? RULES[rule] : "Nothing was drafted in this round: the target wrote one token.");
    panel.querySelector(".step-drafts").replaceChildren(...step.drafts.map((_, i) => cardOf(step, i, rule, outcomes[i], per)));
    const end = panel.querySelector(".step-end");
    end.style.setProperty("--test", `${tests}ms`);
    end.style.setProperty("--drawn", `${tests + DRAW}ms`);
    const line = make("p", "step-ending", count ? endingLine(step, rule, own, detail?.ending) : "");
    end.replaceChildren(line, ...(detail?.ending ? [topOf(step, own, detail.ending)] : []));
    return tests + 2 * DRAW;
  }

  class Stepper {
    constructor(root) {
      this.root = root;
      this.panel = root.querySelector(".step-part");
      this.button = root.querySelector('[data-switch="stepping"]');
      this.pick = Object.fromEntries([...this.panel.querySelectorAll("[data-walk]")].map((e) => [e.dataset.walk, e]));
      this.at = 0;
      this.until = 0;
      this.still = window.matchMedia("(prefers-reduced-motion: reduce)");
      this.button.addEventListener("click", () => this.show(this.button.getAttribute("aria-pressed") === "true"));
      for (const name of ["lane", "sequence"]) this.pick[name].addEventListener("change", () => this.go(this.first()));
      for (const button of this.panel.querySelectorAll("[data-go]")) {
        button.addEventListener("click", () => this.walk(Number(button.dataset.go)));
      }
      this.drafted = this.panel.querySelector("[data-drafted]");
      this.panel.querySelector("[data-close]").addEventListener("click", () => this.toggle());
      document.addEventListener("keydown", (event) => this.key(event));
      document.addEventListener("bass:pause", () => this.toggle());
      document.addEventListener("bass:step", () => this.walk(1));
      document.addEventListener("bass:back", () => this.walk(-1));
      // A run may begin while the panel is open.
      on("start", () => this.open && this.fill());
      on("phase", (phase) => this.open && phase === "waiting" && this.toggle());
    }

    get open() {
      return !this.panel.hidden;
    }

    toggle() {
      this.button.click();
      if (!this.open) this.button.focus({ preventScroll: true });
    }

    show(open) {
      this.panel.hidden = !open;
      hold(open);
      this.mark(null);
      if (!open) return;
      this.fill();
      this.go(run()?.done ? this.first() : this.steps().length - 1);
    }

    /** Offer the run's lanes and sequences. */
    fill() {
      const lanes = [...(run()?.lanes.values() ?? [])];
      const drafting = lanes.filter((lane) => lane.sequences.some(({ steps }) => steps.some((step) => step.drafted.length)));
      const chosen = (lanes.find(({ name }) => name === this.pick.lane.value) ?? drafting.at(-1) ?? lanes.at(-1))?.name;
      offerLanes(this.pick.lane, lanes.map(({ name }) => name));
      this.pick.lane.value = chosen ?? "";
      offerRows(this.pick.sequence, lanes[0]?.sequences.length ?? 0);
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

    /** Go to the next (1) or previous (-1) round. If an animation is running, going to the next round only
        completes it. */
    walk(by) {
      if (!this.open) return this.toggle();
      if (by > 0 && performance.now() < this.until) return this.finish();
      // Snapshots that are held back may contain the next round.
      while (by > 0 && this.near(by) < 0 && next());
      const at = this.near(by);
      if (at >= 0) this.go(at);
      else setText(this.panel.querySelector(".step-line"), `${this.progress()}: there is no ${by > 0 ? "later" : "earlier"} round${this.drafted.checked ? " with drafts" : ""}${by > 0 && !run()?.done ? " yet" : ""}.`);
    }

    finish() {
      this.until = 0;
      this.panel.classList.add("at-end");
    }

    progress() {
      const steps = this.steps(), step = steps[this.at];
      return step ? `Round ${this.at + 1} of ${steps.length}${run().done ? "" : " so far"}` : "No round yet";
    }

    go(at) {
      const steps = this.steps();
      this.at = Math.max(0, Math.min(at, steps.length - 1));
      const step = steps[this.at];
      this.panel.classList.toggle("empty", !step);
      this.panel.classList.remove("at-end");
      this.until = 0;
      this.mark(step);
      if (!step) return setText(this.panel.querySelector(".step-line"), "No round yet: press Run.");
      const ms = drawStep(this.panel, step, this.sequence), count = step.drafted.length;
      this.until = this.still.matches ? 0 : performance.now() + ms;
      const drafts = `${count} ${count === 1 ? "draft" : "drafts"}, ${step.accepted} accepted`;
      setText(this.panel.querySelector(".step-line"), `${this.progress()}: ${count ? drafts : "nothing drafted"}.`);
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
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      const ours = this.panel.contains(event.target) || event.target === document.body || event.target === this.button;
      if (event.defaultPrevented || !this.open || !by || !ours || event.target.matches("select, input") || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      this.walk(by);
    }
  }

  window.Bass.mountStepper = (root) => new Stepper(root);
})();
