/* The verdict and the lanes.
   - The texts are a function of the playhead (playhead.js): what each row had written by then, its drafts in grey while
     the round works, and the drafts of the last round: accepted ones turn green, rejected ones are struck and fall.
   - From the click on Run until the race starts or fails to start, the lanes show "Waiting".
   - The verdict (ui/race/verdict.py) is updated at most once per second while a race runs, and when it stops. Screen readers
     announce only the last one. */
import { on, soon, number, percent, over, setText, make, term, bisect } from "bass/page/page.js";
import { run, firstAndLast, lookOf, laneName, compared } from "bass/race/run.js";
import { EPSILON, draftedBy, sum } from "bass/race/times.js";
import { tape } from "bass/race/tape.js";
import { mountTips } from "bass/race/tokens.js";
import { mountAxis } from "bass/race/axis.js";
import { mountCache } from "bass/race/cache.js";
import { mountStepper } from "bass/race/step.js";
import { mountGlance } from "bass/race/glance.js";
import { mountExact } from "bass/race/exact.js";
import { mountSaid } from "bass/race/said.js";
import { machineOf } from "bass/race/narrate.js";

export let markEqual = null;
const REASONS = {
  eos: "end", stop: "stop string", grammar: "done", length: "length", budget: "time up", stopped: "stopped", error: "error",
};
const VERDICT_MS = 1000;
const COUNTS = { 2: "Two", 3: "Three", 4: "Four", 5: "Five" };
const UNANSWERED = "The race has no winner: too few decoders have a speed to compare.";
const FIGURES = {
  ms_per_token: (v) => number(v, v < 10 ? 2 : v < 100 ? 1 : 0),
  speedup: (v) => number(v, 2, "×"),
  acceptance_rate: (v) => percent(v),
};
// Words of a verdict that open an explanation at their first occurrence.
const WORDS = /\b(rows?|rounds?|drafts?|plain steps?)\b/;

// A text consists of parts of PART tokens. During a race, only its newest NEWEST parts are shown, so that the browser lays
// out the same few tokens per frame, however long the texts are. In a list of short windows these are the newest
// NEWEST_OF_MANY. After the race, about UNFOLDED tokens are shown again per frame.
const PART = 64, NEWEST = 4, NEWEST_OF_MANY = 2, UNFOLDED = 1000;

// A live race with more texts than this shows no drafts: they would come and go in every frame.
const LIVE_TEXTS = 24;
// On the wall, newly accepted drafts stay highlighted for FRESH_MS, and rejected ones fall within FALL_MS.
const FRESH_MS = 900, FALL_MS = 700;

// Names of end tokens, such as <|im_end|> and </s>.
const END = /^<(\W*(im_end|end\w*|eot\w*|eos)\W*|\/s)>$/;

/** The text of a step's draft `i`, in which an end token is named. */
const draftText = ({ row }, i) => (row.drafted_text?.[i] ?? "").replace(END, " (end)");

/** A draft, or several, which are not part of the text: the style sheet shows `data-text`. */
function ghost(className, text) {
  const element = make("i", className);
  element.dataset.text = text;
  element.setAttribute("aria-hidden", "true");
  return element;
}

/** The card of one sequence. `draw` shows its row at a time. */
class Card {
  constructor(list, lane, index, many) {
    const item = make("li", "card");
    const gutter = make("div", "gutter");
    this.badge = make("span", "badge");
    this.medal = make("span", "medal");
    gutter.append(make("span", "rank", `${index + 1}`), this.medal, this.badge);
    const scroll = make("div", "window");
    scroll.tabIndex = 0;
    this.text = make("div", "sequence");
    this.text.dir = "auto";
    this.text.setAttribute("role", "log");
    this.text.setAttribute("aria-live", "off");
    Object.assign(this.text.dataset, { lane, sequence: index });
    const label = `${laneName(lane)}, sequence ${index + 1}`;
    this.text.setAttribute("aria-label", label);
    scroll.setAttribute("aria-label", `${label}; arrow keys explain its tokens`);
    scroll.setAttribute("role", "group");
    scroll.append(this.text);
    this.compared = make("p", "compared");
    this.compared.hidden = true;
    item.append(gutter, scroll, this.compared);
    list.append(item);
    // spans: the elements of the text. newest: how many of its parts a race shows. fresh, lit: the first span that is
    // highlighted, and the end of the highlighted ones.
    Object.assign(this, { item, spans: [], parts: [], newest: many ? NEWEST_OF_MANY : NEWEST, fresh: 0, lit: 0, drafts: [], step: null, fallen: null });
  }

  /** Show the row as it was at `ms`, with its first `count` spans. `lasting` is how long on the wall a ms of race time lasts. With `plain`, show no drafts. */
  draw(row, ms, count, { lasting, moving, plain }) {
    const before = this.spans.length;
    if (count !== before) this.showDrafts(null);
    if (count < before) this.cut(count);
    else if (count > before) this.append(row.spans.slice(before, count), moving);
    if (plain) return this.plain(count);
    const ended = bisect(row.steps.length, (i) => row.steps[i].round.end <= ms + EPSILON);
    const next = row.steps[ended], working = next && next.round.begin <= ms + EPSILON ? next : null;
    this.showDrafts(working, working && ms - working.round.begin);
    this.showFall(row, row.steps[ended - 1], ms, lasting);
    const since = moving ? ms - FRESH_MS / lasting : Infinity;
    this.highlight(bisect(count, (i) => row.spans[i].at < since), count);
  }

  /** Show the text only, with its first `count` spans. */
  plain(count) {
    this.showDrafts(null);
    this.dropFall();
    this.highlight(count, count);
  }

  /** Append spans. With `fold`, hide all but the newest parts. */
  append(spans, fold) {
    for (let at = 0; at < spans.length;) {
      if (this.spans.length === this.parts.length * PART) this.addPart(fold);
      const some = spans.slice(at, at + this.parts.length * PART - this.spans.length), elements = some.map(({ origin, text, index, certain }) => {
        const span = make("span", `token ${origin}${certain ? " certain" : ""}${text && !text.trim() ? " break" : ""}`, text);
        span.token = index;
        return span;
      });
      this.parts.at(-1).append(...elements);
      this.spans.push(...elements);
      at += some.length;
    }
  }

  addPart(fold) {
    const part = make("span");
    this.text.append(part);
    const older = this.parts[this.parts.push(part) - 1 - this.newest];
    if (!older) return;
    older.className = "older";
    if (fold) this.item.classList.add("folded");
  }

  /** Remove all but the first `count` spans. */
  cut(count) {
    this.dropFall();
    const parts = Math.ceil(count / PART);
    for (const part of this.parts.splice(parts)) part.remove();
    for (const span of this.spans.slice(count, parts * PART)) span.remove();
    this.spans.length = count;
    this.lit = Math.min(this.lit, count);
    for (const part of this.parts.slice(-this.newest)) part.className = "";
  }

  /** Show the drafts of a step that has worked for `ms`. null removes them. */
  showDrafts(step, ms = 0) {
    if (step !== this.step) {
      for (const draft of this.drafts) draft.remove();
      this.step = step;
      this.drafts = step ? step.chain.map((i) => ghost("draft", draftText(step, i))) : [];
      this.text.append(...this.drafts);
    }
    if (!step) return;
    const written = Math.floor(ms / (draftedBy(step.round) - step.round.begin) * step.chain.length + 1e-9);
    this.drafts.forEach((element, i) => (element.hidden = i >= written));
  }

  /** Strike the rejected draft of the newest judged step, below the token that replaces it. "…" stands for further drafts. */
  showFall(row, step, ms, lasting) {
    const at = step && step.row.written > step.row.accepted ? step.row.start + step.row.accepted : -1;
    const rejected = step?.chain.slice(step.row.accepted) ?? [];
    const falls = at >= 0 && rejected.length > 0 && ms - step.round.end <= FALL_MS / lasting;
    if (!falls || this.fallen?.step !== step) this.dropFall();
    if (!falls || this.fallen) return;
    const span = this.spans.findLast(({ token }) => token === at);
    if (!span) return;
    const text = draftText(step, rejected[0]);
    this.fallen = ghost("fallen", `${text.trim() || text}${rejected.length > 1 ? "…" : ""}`);
    this.fallen.step = step;
    // Inside the token, so that it is on the same line.
    span.prepend(this.fallen);
  }

  dropFall() {
    this.fallen?.remove();
    this.fallen = null;
  }

  /** Highlight the accepted drafts from span `from` on. */
  highlight(from, count) {
    for (let i = this.fresh; i < Math.min(from, this.lit); i += 1) this.spans[i].classList.remove("fresh");
    for (let i = from; i < count; i += 1) this.spans[i].classList.add("fresh");
    Object.assign(this, { fresh: from, lit: count });
  }
}

class Lane {
  constructor(section) {
    this.name = section.dataset.lane;
    this.section = section;
    this.state = section.querySelector(".state");
    this.read = section.querySelector(".read");
    this.bar = section.querySelector(".read-bar");
    this.list = section.querySelector(".sequences");
    this.line = section.querySelector(".lane-line");
    this.idle = this.line.textContent;
    this.figures = [...section.querySelectorAll("[data-figure]")];
    this.reset(0);
  }

  reset(count) {
    this.list.replaceChildren();
    this.list.style.setProperty("--count", Math.max(count, 1));
    const many = count > 8;
    this.list.classList.toggle("many", many);
    this.cards = Array.from({ length: count }, (_, i) => new Card(this.list, this.name, i, many));
    this.restart();
  }

  /** Show no figures yet, as at the start of a run. The texts stay. */
  restart() {
    const count = this.cards.length;
    this.running = count > 0;
    this.before = null;
    for (const figure of this.figures) setText(figure, "–");
    setText(this.line, this.idle);
    this.say(count ? "Running" : "Ready");
    for (const { badge, medal } of this.cards) for (const mark of [badge, medal]) setText(mark, "");
    this.showReading(null);
  }

  /** Whether the Tab key stops at the labels of the figures. */
  stop(stops) {
    for (const label of this.section.querySelectorAll(".figures .term")) label.tabIndex = stops ? 0 : -1;
  }

  /** Show the lane's state. The axis already shows whether the lane runs or has finished: only screen readers need those. */
  say(state) {
    setText(this.state, state);
    this.state.classList.toggle("spoken", state === "Running" || state === "Finished");
  }

  /** Show "Waiting", or the previous state if no race started. */
  wait(waits) {
    if (waits && !this.section.hidden) {
      this.before = this.state.textContent;
      this.say("Waiting");
    } else if (!waits && this.before !== null) {
      this.say(this.before);
      this.before = null;
    }
  }

  /** End a lane that was unfinished at the end of the run. */
  end(state, badge) {
    if (!this.running) return;
    this.running = false;
    this.say(state);
    this.showReading(null);
    for (const card of this.cards) if (!card.badge.textContent) setText(card.badge, badge);
  }

  /** Show below each row how it differs from the reference lane's. A row that differs in any lane has this line in all lanes, so that
      they stay aligned. */
  compare(rows, differing) {
    this.cards.forEach(({ compared }, i) => {
      compared.hidden = !differing[i];
      setText(compared, rows[i] ?? "");
    });
  }

  /** Show how much of the prompt has been read. null hides it. */
  showReading(reading) {
    this.section.classList.toggle("reading", Boolean(reading));
    setText(this.read, reading ? `${number(reading.fed, 0)} of ${number(reading.total, 0)} tokens` : "");
    this.bar.value = reading ? reading.fed / reading.total : 0;
    if (!reading) return;
    const { length } = this.cards, [first] = reading.sequences;
    const single = reading.sequences.length === 1 && length > 1;
    this.say(single ? `Reading prompt ${first + 1} of ${length}` : "Reading the prompt");
  }

  showNumbers(lane) {
    // The speed has no standard error (scatter) as long as there are too few rounds to know it.
    const { metrics } = lane, early = !lane.finished && metrics.scatter === null;
    for (const figure of this.figures) {
      const key = figure.dataset.figure, value = early && key === "ms_per_token" ? null : metrics[key] ?? null;
      setText(figure, value === null ? "–" : FIGURES[key](value));
    }
    this.showCertain();
    if (lane.error) this.say(`Failed: ${lane.error}`);
    else if (lane.finished) this.say(this.summary(lane));
    // At the playhead of a race that is over, prompts have been read.
    const reading = tape.state.follows ? lane.reading : null;
    if (this.running && !lane.finished && !lane.error && !reading) this.say("Running");
    if (lane.finished || lane.error) this.running = false;
    this.showReading(this.running ? reading : null);
    const { first, last } = firstAndLast(run().lanes.get(this.name), lane.finish_reasons);
    // Show no badges if all rows ended with the end token.
    const allEnded = lane.finished && lane.finish_reasons.every((reason) => reason === "eos");
    lane.finish_reasons.forEach((reason, i) => {
      setText(this.cards[i].badge, allEnded ? "" : REASONS[reason] ?? "");
      setText(this.cards[i].medal, i === first ? "First" : i === last ? "Last" : "");
    });
  }

  /** Show in place of the lane's line how many tokens were drafted because the grammar allowed no other. */
  showCertain() {
    const { sequences } = run().lanes.get(this.name), written = sum(sequences.map(({ tokens }) => tokens.length));
    const certain = sum(sequences.flatMap(({ steps }) => steps.map((step) => (step.certain ? Math.min(step.written, step.drafts.length) : 0))));
    setText(this.line, certain ? `${number(certain, 0)} of ${number(written, 0)} tokens were certain drafts` : this.idle);
  }

  /** How the lane ended, in words. Its times are on the axis. */
  summary({ finish_reasons: reasons }) {
    if (!reasons.includes("budget")) return "Finished";
    const done = reasons.filter((reason) => ["eos", "length", "stop", "grammar"].includes(reason)).length;
    return `Finished ${done} of ${reasons.length} within the budget`;
  }

  /** Show the texts at the lane's time. */
  draw(times, look) {
    const ms = tape.timeOf(this.name);
    this.cards.forEach((card, i) => {
      const count = tape.spansAt(this.name, i, ms);
      card.draw(times.rows[i], ms, count, look);
      card.item.classList.toggle("waits", !count && times.clock > 0 && !["stopped", "error"].includes(tape.state.ended));
    });
  }
}

class Board {
  constructor(element, mark) {
    Object.assign(this, { element, mark });
    this.grid = element.querySelector(".lane-grid");
    this.lanes = [...element.querySelectorAll(".lane")].map((section) => new Lane(section));
    this.view = null;
    this.show = this.show.bind(this);
    on("start", (head) => this.start(head));
    on("view", (view) => {
      this.view = view;
      if (!this.stopped) soon(this.show);
    });
    on("phase", (phase) => this.phase(phase));
    on("instant", ({ jumped }) => jumped && this.show());
    on("playhead", (head) => this.draw(head));
    markEqual = (counts) => this.markEqual(counts);
  }

  /** The section of a lane, created from the first lane's if it has none. */
  lane(name) {
    const known = this.lanes.find((lane) => lane.name === name);
    if (known) return known;
    const section = this.lanes[0].section.cloneNode(true);
    section.id = `lane-${name}`;
    section.dataset.lane = name;
    section.setAttribute("aria-labelledby", `lane-${name}-title`);
    const title = section.querySelector("h2");
    title.id = `lane-${name}-title`;
    const { label, about, line, colour } = lookOf(name);
    section.style.setProperty("--lane", `var(--${colour})`);
    title.replaceChildren(about ? term(`lane-${name}`, label) : label);
    section.querySelector(".sequences").setAttribute("aria-labelledby", title.id);
    setText(section.querySelector(".lane-line"), line ?? "");
    this.lanes.push(new Lane(section));
    return this.lanes.at(-1);
  }

  /** Prepare for a new run: show only its lanes, in its order. */
  start(head) {
    const { lanes, batch_size: count, settings } = head;
    Object.assign(this, { view: null, stopped: false });
    const shown = lanes.map((name) => this.lane(name));
    // The same head again means a jump back in the run, which the playhead draws.
    if (head === this.head) {
      for (const lane of shown) lane.restart();
      return;
    }
    this.head = head;
    for (const lane of this.lanes) {
      lane.section.hidden = !shown.includes(lane);
      lane.section.classList.toggle("reference", lane.name === head.reference);
      lane.reset(shown.includes(lane) ? count : 0);
    }
    this.grid.append(...shown.map((lane) => lane.section));
    this.grid.dataset.count = shown.length;
    this.grid.classList.toggle("alone", !lanes.includes(head.reference));
    const { json_schema: schema, regex, grammar } = settings;
    this.element.classList.toggle("has-grammar", Boolean(schema || regex || grammar));
    // All lanes show the figures' labels. The Tab key stops only at those of the first lane that shows all of them.
    const stop = shown.find(({ name }) => name !== head.reference) ?? shown[0];
    for (const lane of this.lanes) lane.stop(lane === stop);
    const { recorded } = tape.state;
    setText(this.element.querySelector(".race-note"), recorded ? `Recorded on ${machineOf(recorded)}.`
      : settings.temperature !== 0 || Number.isFinite(settings.acceptance) || count < 2 || settings.prompts === "lines" ? ""
        : `Temperature 0: the ${count} rows of a lane are the same.`);
  }

  /** Show the newest numbers. */
  show() {
    const lanes = this.view?.lanes ?? {};
    this.view = null;
    for (const [name, value] of Object.entries(lanes)) this.lane(name).showNumbers(value);
  }

  /** Draw the texts at the playhead, and mark the rows that differ. */
  draw({ speed, follows, moving }) {
    const { race } = tape;
    if (race?.head !== this.head) return;
    this.grid.classList.toggle("still", !moving);
    const plain = follows && !tape.state.ended && race.lanes.size * this.head.batch_size > LIVE_TEXTS;
    for (const [name, times] of race.lanes) this.lane(name).draw(times, { lasting: follows ? 1 : 1 / speed, moving, plain });
    const differences = compared(), rows = Object.values(differences);
    const differing = Array.from({ length: this.head.batch_size }, (_, i) => rows.some((row) => row[i]));
    for (const lane of this.lanes) lane.compare(differences[lane.name] ?? [], differing);
  }

  /** Mark the first tokens of each row, `counts` by row, in all lanes. null removes the marks. */
  markEqual(counts) {
    for (const { cards } of this.lanes) {
      cards.forEach(({ spans }, i) => {
        for (const span of spans) span.classList.toggle("equal", counts !== null && span.token < counts[i]);
      });
    }
  }

  /** Show the folded tokens of all texts, a few per frame, unless another race has begun. */
  unfold() {
    if (!this.over) return;
    const folded = this.lanes.flatMap(({ cards }) => cards).filter(({ item }) => item.classList.contains("folded"));
    for (let shown = 0; folded.length && shown < UNFOLDED;) {
      const { item, spans } = folded.shift();
      item.classList.remove("folded");
      shown += spans.length;
    }
    if (folded.length) requestAnimationFrame(() => this.unfold());
    else soon(this.mark);
  }

  phase(phase) {
    this.over = over(phase);
    if (this.over) soon(() => this.unfold());
    // After Stop, values that the server sent earlier may still arrive.
    this.stopped = phase === "stopped";
    if (phase === "stopped" || phase === "error") {
      this.show();
      for (const lane of this.lanes) lane.end(phase === "stopped" ? "Stopped" : "Ended early", "stopped");
    }
    if (phase !== "running") for (const lane of this.lanes) lane.wait(phase === "waiting");
  }
}

class Verdict {
  constructor(element) {
    this.head = element.querySelector(".verdict-head");
    this.list = element.querySelector("ul");
    this.more = element.querySelector(".verdict-more");
    on("start", ({ lanes }) => {
      Object.assign(this, { last: -Infinity, count: lanes.length });
      this.clear();
    });
    on("view", (view) => this.take(view));
    on("instant", () => tape.state.playing || this.show(run()?.view));
    on("phase", (phase) => ["stopped", "error"].includes(phase) && this.show(run()?.view));
  }

  /** Show no verdict, but the question of the race. `done`: whether the race has ended without an answer. */
  clear(done = false) {
    this.more.hidden = true;
    if (!done) this.head.setAttribute("aria-live", "off");
    setText(this.head, this.count === 1 ? "One decoder runs alone, so there is no race." : done ? UNANSWERED
      : `${COUNTS[this.count] ?? this.count} decoders, one model: which is fastest?`);
    this.list.replaceChildren();
  }

  take(view) {
    if (!view.done && !tape.replaying && performance.now() - this.last < VERDICT_MS) return;
    if (view.done) this.head.setAttribute("aria-live", "polite");
    this.show(view);
  }

  show(view) {
    if (!view) return;
    this.last = performance.now();
    if (!view.verdict.head) return this.clear(view.done);
    this.more.hidden = false;
    setText(this.head, view.verdict.head);
    const lines = Object.values(view.verdict.lanes), explained = new Set();
    if (lines.join() === [...this.list.children].map((line) => line.textContent).join()) return;
    this.list.replaceChildren(...lines.map((line) => {
      const item = make("li");
      item.append(...line.split(WORDS).map((part, i) => {
        const word = part.replace(/s$/, "");
        if (i % 2 === 0 || explained.has(word)) return part;
        explained.add(word);
        return term(word, part);
      }));
      return item;
    }));
  }
}

/** Show the newest lines of a text during a race and its beginning afterwards. Mark windows whose text continues below.
    Returns the function that marks them. */
function bindBeginnings(root) {
  const mark = () => {
    const ended = root.classList.contains("ended");
    for (const box of root.querySelectorAll(".window")) {
      // Only long texts are folded. Their windows are measured later, when the whole text is shown.
      box.classList.toggle("goes-on", ended && (Boolean(box.closest(".folded")) || box.scrollHeight > box.clientHeight + 2));
    }
  };
  on("start", () => root.classList.remove("ended"));
  on("phase", (phase) => {
    if (!over(phase)) return;
    root.classList.add("ended");
    soon(mark);
  });
  new ResizeObserver(() => soon(mark)).observe(root);
  return mark;
}

/** Bind the buttons that change the look of the texts. Each pressed button sets a class on the board. */
function bindSwitches(root) {
  for (const button of root.querySelectorAll(".switch")) {
    const apply = (pressed) => {
      button.setAttribute("aria-pressed", String(pressed));
      root.classList.toggle(button.dataset.switch, pressed);
    };
    apply(button.getAttribute("aria-pressed") === "true");
    button.addEventListener("click", () => apply(button.getAttribute("aria-pressed") !== "true"));
  }
}

export const mountLanes = (element) => {
  const root = element.querySelector(".bass-lanes");
  bindSwitches(root);
  mountTips(root);
  new Verdict(root.querySelector(".verdict"));
  mountStepper(root);
  mountExact(root);
  mountSaid(root);
  new Board(root, bindBeginnings(root));
  mountAxis(root);
  mountCache(root);
  mountGlance(root);
};
