/* The verdict and the lanes.
   - A snapshot's tokens appear one by one until the next snapshot is due, in the order and at the pace of their lane times,
     never before they were written. The snapshot's numbers appear with its first token.
   - From the click on Run until the race starts or fails to start, the lanes show "Waiting".
   - The verdict (ui/race/verdict.py) is updated at most once per second during the race, and at its end. Screen readers
     announce only the last one. */
(() => {
  "use strict";
  const { on, soon, number, percent, over, setText, make, term, run, ORIGINS, firstAndLast, lookOf, laneName, sum, tape, wear, writtenIn } = window.Bass;
  const REASONS = { eos: "end", stop: "stop string", length: "length", budget: "time up", stopped: "stopped", error: "error" };
  const SNAPSHOT_MS = 100, VERDICT_MS = 1000;
  const FIGURES = {
    ms_per_token: (v) => number(v, v < 10 ? 2 : v < 100 ? 1 : 0),
    speedup: (v) => number(v, 2, "×"),
    acceptance_rate: (v) => percent(v),
  };
  // Words of a verdict that open an explanation at their first occurrence.
  const WORDS = /\b(rows?|rounds?|drafts?|plain steps?)\b/;

  // Once a text has LIVE tokens in view during a race, all but the NEWEST are folded away, so that the browser need not lay
  // them out in each frame. After the race, UNFOLDED texts are unfolded per frame.
  const LIVE = 400, NEWEST = 200, UNFOLDED = 4;

  /** The card of one sequence. `append` adds the spans of tokens to its text. */
  class Card {
    constructor(list, lane, index) {
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
      this.item = item;
      this.count = this.live = 0;
    }

    append(spans) {
      this.text.append(...spans);
      this.live += spans.length;
      if (this.live < LIVE) return;
      const older = make("span", "older"), all = [...this.text.children];
      older.append(...all.slice(all.length - this.live, all.length - NEWEST));
      this.text.insertBefore(older, this.text.children[this.text.children.length - NEWEST]);
      this.live = NEWEST;
      this.item.classList.add("folded");
    }

    /** Turn the log's tokens of this sequence into {card, span, ms}. */
    spans(tokens) {
      return tokens.map(([origin, text, ms]) => {
        // "+": text that belongs to the previous token.
        if (origin !== "+") [this.origin, this.count] = [ORIGINS[origin], this.count + 1];
        const span = make("span", `token ${this.origin}`, text);
        span.token = this.count - 1;
        return { card: this, span, ms };
      });
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
      this.figures = [...section.querySelectorAll("[data-figure]")];
      this.reset(0);
    }

    reset(count) {
      this.list.replaceChildren();
      this.list.style.setProperty("--count", Math.max(count, 1));
      this.list.classList.toggle("many", count > 8);
      this.cards = Array.from({ length: count }, (_, i) => new Card(this.list, this.name, i));
      this.clock = 0;
      this.running = count > 0;
      this.before = null;
      for (const figure of this.figures) setText(figure, "–");
      setText(this.state, count ? "Running" : "Ready");
      this.showReading(null);
    }

    /** Show "Waiting", or the previous state if no race started. */
    wait(waits) {
      if (waits && !this.section.hidden) {
        this.before = this.state.textContent;
        setText(this.state, "Waiting");
      } else if (!waits && this.before !== null) {
        setText(this.state, this.before);
        this.before = null;
      }
    }

    /** End a lane that was unfinished at the end of the run. */
    end(state, badge) {
      if (!this.running) return;
      this.running = false;
      setText(this.state, state);
      this.showReading(null);
      for (const card of this.cards) if (!card.badge.textContent) setText(card.badge, badge);
    }

    /** Show below each row whether it equals that of the reference lane, which gets empty lines to stay aligned. */
    compare(rows) {
      this.cards.forEach(({ compared }, i) => {
        compared.hidden = false;
        compared.title = rows[i]?.title ?? "";
        compared.classList.toggle("differs", Boolean(rows[i]?.differs));
        setText(compared, rows[i]?.text ?? "");
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
      setText(this.state, single ? `Reading prompt ${first + 1} of ${length}` : "Reading the prompt");
    }

    showNumbers(lane) {
      const { metrics } = lane, early = !lane.finished && metrics.speedup === null;
      for (const figure of this.figures) {
        const key = figure.dataset.figure, value = early && key === "ms_per_token" ? null : metrics[key] ?? null;
        setText(figure, value === null ? "–" : FIGURES[key](value));
      }
      if (lane.error) setText(this.state, `Failed: ${lane.error}`);
      else if (lane.finished) setText(this.state, this.summary(lane));
      else if (this.running && !lane.reading) setText(this.state, "Running");
      if (lane.finished || lane.error) this.running = false;
      this.showReading(this.running ? lane.reading : null);
      const { first, last } = firstAndLast(run().lanes.get(this.name), lane.finish_reasons);
      // Show no badges if all rows ended with the end token.
      const allEnded = lane.finished && lane.finish_reasons.every((reason) => reason === "eos");
      lane.finish_reasons.forEach((reason, i) => {
        setText(this.cards[i].badge, allEnded ? "" : REASONS[reason] ?? "");
        setText(this.cards[i].medal, i === first ? "First" : i === last ? "Last" : "");
      });
    }

    /** The lane's time in words. The time for the prompt is separate, because no speed includes it. */
    summary(lane) {
      const seconds = (ms) => number(ms / 1000, 2, " s"), reasons = lane.finish_reasons;
      const { rounds } = run().lanes.get(this.name);
      const reading = sum(rounds.map(({ kind, time_ms: ms }, i) => (kind === "prefill" ? ms - (rounds[i - 1]?.time_ms ?? 0) : 0)));
      const spent = `${seconds(lane.clock_ms - reading)} + prompt ${seconds(reading)}`;
      if (!reasons.includes("budget")) return wear(`Finished: ${spent}`);
      const done = reasons.filter((reason) => ["eos", "length", "stop"].includes(reason)).length;
      return wear(`Finished ${done} of ${reasons.length} within the budget: ${spent}`);
    }

    /** New tokens, each with `due`, the time to reveal it, within `span` ms from now. */
    tokens(lane, now, span) {
      const from = this.clock, width = Math.max(lane.clock_ms - from, 1e-6);
      this.clock = lane.clock_ms;
      return Object.entries(lane.new).flatMap(([i, tokens]) => this.cards[i].spans(tokens)).map((token) => ({
        ...token, due: now + span * Math.min(1, Math.max(0, (token.ms - from) / width)),
      }));
    }
  }

  class Board {
    constructor(element) {
      this.element = element;
      this.grid = element.querySelector(".lane-grid");
      this.lanes = [...element.querySelectorAll(".lane")].map((section) => new Lane(section));
      this.pending = [];
      this.view = null;
      this.draw = this.draw.bind(this);
      this.still = window.matchMedia("(prefers-reduced-motion: reduce)");
      on("start", (head) => this.start(head));
      on("line", (line) => this.read(line));
      on("view", (view) => {
        this.view = view;
        if (!this.stopped) soon(this.draw);
      });
      on("phase", (phase) => this.phase(phase));
      on("instant", ({ jumped }) => jumped && this.now());
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
      const { label, about, colour } = lookOf(name);
      section.style.setProperty("--lane", `var(--${colour})`);
      setText(title, label);
      section.querySelector(".sequences").setAttribute("aria-labelledby", title.id);
      setText(section.querySelector(".about"), about);
      this.lanes.push(new Lane(section));
      return this.lanes.at(-1);
    }

    /** Prepare for a new run: show only its lanes, in its order. */
    start(head) {
      const { lanes, batch_size: count, settings } = head;
      Object.assign(this, { pending: [], view: null, span: SNAPSHOT_MS, arrived: 0, stopped: false });
      const shown = lanes.map((name) => this.lane(name));
      for (const lane of this.lanes) {
        lane.section.hidden = !shown.includes(lane);
        lane.section.classList.toggle("reference", lane.name === head.reference);
        lane.reset(shown.includes(lane) ? count : 0);
      }
      if (window.Bass.owed(head)) for (const lane of shown) lane.compare([]);
      this.grid.append(...shown.map((lane) => lane.section));
      this.grid.dataset.count = shown.length;
      const { recorded } = tape.state;
      setText(this.element.querySelector(".race-note"), recorded ? this.recorded(recorded, head)
        : settings.temperature !== 0 || Number.isFinite(settings.acceptance) || count < 2 || settings.prompts === "lines" ? ""
          : `Temperature 0: the ${count} rows of a lane are the same.`);
    }

    recorded({ made, about }, { batch_size: rows, settings: { temperature } }) {
      const date = made?.date ?? about.match(/\d{4}-\d\d-\d\d/)?.[0];
      const of = `Batch ${rows}${Number.isFinite(temperature) ? `, temperature ${temperature}` : ""}.`;
      // With models, page/form.js lists the settings in which the recording differs from the form. Without models, name
      // the main settings here.
      const then = document.querySelector("[data-replay]") ? `. ${of}` : ": press Run to race on this machine.";
      return `Recorded${date ? ` on ${date}` : ""}${then}`;
    }

    /** Show the newest numbers. */
    show() {
      const lanes = this.view?.lanes ?? {};
      this.view = null;
      for (const [name, value] of Object.entries(lanes)) {
        this.lane(name).showNumbers(value);
      }
      for (const [name, rows] of Object.entries(window.Bass.compared())) this.lane(name).compare(rows);
    }

    /** Take the tokens that one snapshot adds. */
    read(line) {
      if (this.stopped) return;
      const now = performance.now();
      if (this.arrived) this.span = Math.min(400, Math.max(30, 0.7 * this.span + 0.3 * (now - this.arrived)));
      this.arrived = now;
      // Tokens of earlier snapshots become due now, so that they are revealed before this snapshot's tokens.
      for (const token of this.pending) token.due = Math.min(token.due, now);
      for (const [name, update] of Object.entries(line)) {
        this.pending.push(...this.lane(name).tokens(update, now, this.span));
      }
      this.pending.sort((a, b) => a.due - b.due);
      soon(this.draw);
    }

    /** Show the newest numbers and the due tokens, or all tokens in a hidden page or with reduced motion. */
    draw() {
      this.show();
      this.reveal(document.hidden || this.still.matches ? Infinity : performance.now());
      if (this.pending.length) soon(this.draw);
    }

    /** Show everything that has arrived, at once. */
    now() {
      this.show();
      this.reveal(Infinity);
    }

    /** Append every pending token that is due by `now`, in order, with one insertion per card. */
    reveal(now) {
      let due = 0;
      while (due < this.pending.length && this.pending[due].due <= now) due += 1;
      const byCard = new Map();
      for (const { card, span } of this.pending.splice(0, due)) {
        if (!byCard.has(card)) byCard.set(card, []);
        byCard.get(card).push(span);
      }
      for (const [card, spans] of byCard) card.append(spans);
    }

    /** Show the folded tokens of all texts, a few texts per frame. */
    unfold() {
      const folded = [...this.grid.querySelectorAll(".folded")];
      for (const card of folded.slice(0, UNFOLDED)) card.classList.remove("folded");
      if (folded.length > UNFOLDED) requestAnimationFrame(() => this.unfold());
    }

    phase(phase) {
      if (over(phase)) soon(() => this.unfold());
      // After Stop, values that the server sent earlier may still arrive.
      this.stopped = phase === "stopped";
      if (phase === "stopped" || phase === "error") {
        this.now();
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
      this.question = this.head.textContent;
      on("start", () => {
        this.last = -Infinity;
        this.clear();
      });
      on("view", (view) => this.take(view));
      on("phase", (phase) => ["stopped", "error"].includes(phase) && this.show(run()?.view));
    }

    clear() {
      this.more.hidden = true;
      this.head.setAttribute("aria-live", "off");
      setText(this.head, this.question);
      this.list.replaceChildren();
    }

    take(view) {
      if (!view.done && performance.now() - this.last < VERDICT_MS) return;
      if (view.done) this.head.setAttribute("aria-live", "polite");
      this.show(view);
    }

    show(view) {
      if (!view) return;
      this.last = performance.now();
      if (!view.verdict.head) return void (view.done || this.clear());
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

  /** Show the newest lines of a text during a race and its beginning afterwards. Mark windows whose text continues below. */
  function bindBeginnings(root) {
    const mark = () => {
      const ended = root.classList.contains("ended");
      for (const box of root.querySelectorAll(".window")) {
        box.classList.toggle("goes-on", ended && box.scrollHeight > box.clientHeight + 2);
      }
    };
    on("start", () => root.classList.remove("ended"));
    on("phase", (phase) => {
      if (!over(phase)) return;
      root.classList.add("ended");
      soon(mark);
    });
    new ResizeObserver(() => soon(mark)).observe(root);
  }

  /** Bind the buttons that change the look of the texts. Each pressed button sets a class on the board. */
  function bindSwitches(root) {
    for (const button of root.querySelectorAll(".switch")) {
      const apply = (pressed) => {
        button.setAttribute("aria-pressed", String(pressed));
        root.classList.toggle(button.dataset.switch, pressed);
        if (button.dataset.switch === "slow") window.Bass.halfSpeed(pressed);
      };
      apply(button.getAttribute("aria-pressed") === "true");
      button.addEventListener("click", () => apply(button.getAttribute("aria-pressed") !== "true"));
    }
  }

  window.Bass.mountLanes = (element) => {
    const root = element.querySelector(".bass-lanes");
    bindSwitches(root);
    window.Bass.mountTips(root);
    new Verdict(root.querySelector(".verdict"));
    window.Bass.mountStepper(root);
    window.Bass.mountExact(root);
    new Board(root);
    window.Bass.mountStrips(root);
    window.Bass.mountCache(root);
    bindBeginnings(root);
    window.Bass.mountGlance(root);
  };
})();
