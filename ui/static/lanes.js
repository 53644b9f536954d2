/* Contract: draws the lanes. Numbers change when a snapshot comes; its tokens are revealed one by one until
   the next is due, in the order and at the pace of their lane times, never before they were written. */
(() => {
  "use strict";
  const { on, number, setText } = window.Bass;
  const ORIGINS = { s: "sampled", a: "accepted", r: "recovered", b: "bonus" };
  const REASONS = { eos: "end", length: "length", budget: "time up", stopped: "stopped", error: "error" };
  const FIGURES = {
    ms_per_token: (v) => number(v, v < 10 ? 2 : v < 100 ? 1 : 0),
    speedup: (v) => number(v, 2, "×"),
    throughput_tps: (v) => number(v, 1),
    acceptance_rate: (v) => number(v === null ? null : v * 100, 0, " %"),
    new_tokens: (v) => number(v, 0),
  };

  /** One sequence's card; `append` takes a token's span into the text. */
  class Card {
    constructor(list, lane, index) {
      const item = document.createElement("li");
      item.className = "card";
      const gutter = document.createElement("div");
      gutter.className = "gutter";
      const rank = document.createElement("span");
      rank.className = "rank";
      rank.textContent = `${index + 1}`;
      this.badge = document.createElement("span");
      this.badge.className = "badge";
      gutter.append(rank, this.badge);
      const scroll = document.createElement("div");
      scroll.className = "window";
      scroll.tabIndex = 0;
      this.text = document.createElement("div");
      this.text.className = "sequence";
      this.text.dir = "auto";
      this.text.setAttribute("role", "log");
      this.text.setAttribute("aria-live", "off");
      const label = `${lane}, sequence ${index + 1}`;
      this.text.setAttribute("aria-label", label);
      scroll.setAttribute("aria-label", label);
      scroll.setAttribute("role", "group");
      scroll.append(this.text);
      item.append(gutter, scroll);
      list.append(item);
    }

    /** The log's tokens of this sequence as {card, span, ms}. */
    spans(tokens) {
      return tokens.map(([origin, text, ms]) => {
        // "+" is text that the token before had held back.
        if (origin !== "+") this.origin = ORIGINS[origin];
        const span = document.createElement("span");
        span.className = `token ${this.origin}`;
        span.textContent = text;
        return { card: this, span, ms };
      });
    }
  }

  class Lane {
    constructor(section) {
      this.name = section.dataset.lane;
      this.section = section;
      this.state = section.querySelector(".state");
      this.list = section.querySelector(".sequences");
      this.figures = [...section.querySelectorAll("[data-figure]")];
      this.soFar = section.querySelector(".so-far");
      this.reset(0);
    }

    reset(count) {
      this.list.replaceChildren();
      this.list.dataset.count = count;
      const title = this.section.querySelector("h2").textContent;
      this.cards = Array.from({ length: count }, (_, i) => new Card(this.list, title, i));
      this.clock = 0;
      this.running = count > 0;
      setText(this.state, count ? "Running" : "Ready");
    }

    /** A run that ended before this lane did. */
    end(state, badge) {
      if (!this.running) return;
      this.running = false;
      setText(this.state, state);
      for (const card of this.cards) if (!card.badge.textContent) setText(card.badge, badge);
    }

    showNumbers(lane, bothFinished) {
      for (const place of this.figures) {
        const key = place.dataset.figure;
        setText(place, FIGURES[key](lane.metrics[key] ?? null));
      }
      setText(this.soFar, bothFinished || lane.metrics.speedup === null ? "" : ", so far");
      if (lane.error) setText(this.state, `Failed: ${lane.error}`);
      else if (lane.finished) setText(this.state, `Finished after ${number(lane.clock_ms / 1000, 2)} s of lane time`);
      if (lane.finished || lane.error) this.running = false;
      lane.finish_reasons.forEach((reason, i) => setText(this.cards[i].badge, REASONS[reason] ?? ""));
    }

    /** New tokens, each with the moment to reveal it within `span` ms from now. */
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
      this.lanes = [...element.querySelectorAll(".lane")].map((section) => new Lane(section));
      this.pending = [];
      this.run = null;
      this.arrived = 0;
      this.span = 100;
      this.frame = 0;
      this.tick = this.tick.bind(this);
      this.still = window.matchMedia("(prefers-reduced-motion: reduce)");
      on("log", (log) => this.read(log));
      on("view", (view) => this.show(view));
      on("phase", (phase) => this.phase(phase));
      document.addEventListener("visibilitychange", () => document.hidden && this.reveal(Infinity));
    }

    show(view) {
      if (this.stopped) return;
      this.start(view);
      for (const lane of this.lanes) {
        const value = view.lanes[lane.name];
        if (value) lane.showNumbers(value, value.finished && view.lanes.regular?.finished);
      }
    }

    /** Take in the log's new lines, one a snapshot; its first line names the run. */
    read(log) {
      if (this.stopped) return;
      const now = performance.now();
      const head = log.split("\n", 1)[0];
      this.start(JSON.parse(head));
      this.reveal(Infinity);
      if (!this.offset) this.offset = head.length;
      else this.span = Math.min(400, Math.max(30, 0.7 * this.span + 0.3 * (now - this.arrived)));
      this.arrived = now;
      for (const line of log.slice(this.offset).split("\n")) {
        if (!line) continue;
        const lanes = JSON.parse(line);
        for (const lane of this.lanes) {
          if (lanes[lane.name]) this.pending.push(...lane.tokens(lanes[lane.name], now, this.span));
        }
      }
      this.offset = log.length;
      this.pending.sort((a, b) => a.due - b.due);
      if (document.hidden || this.still.matches) this.reveal(Infinity);
      else this.schedule();
    }

    /** Make room for a run that is new; log and view may come in any order. */
    start({ run, batch_size: count, temperature }) {
      if (run === this.run) return;
      this.reveal(Infinity);
      Object.assign(this, { run, offset: 0, span: 100 });
      for (const lane of this.lanes) lane.reset(count);
      const note = this.element.querySelector(".greedy-note");
      note.hidden = temperature !== 0 || count < 2;
      setText(note, `Temperature 0: the likeliest token is always taken, so the ${count} sequences of a lane ` +
        "are the same.");
    }

    schedule() {
      if (this.pending.length && !this.frame) this.frame = requestAnimationFrame(this.tick);
    }

    tick() {
      this.frame = 0;
      this.reveal(performance.now());
      this.schedule();
    }

    /** Append every pending token that is due by `now`, in order, one insertion a card. */
    reveal(now) {
      let due = 0;
      while (due < this.pending.length && this.pending[due].due <= now) due += 1;
      const byCard = new Map();
      for (const { card, span } of this.pending.splice(0, due)) {
        if (!byCard.has(card)) byCard.set(card, []);
        byCard.get(card).push(span);
      }
      for (const [card, spans] of byCard) card.text.append(...spans);
    }

    phase(phase) {
      // What was under way when Stop was pressed may still arrive.
      this.stopped = phase === "stopped";
      if (phase !== "stopped" && phase !== "error") return;
      this.reveal(Infinity);
      for (const lane of this.lanes) lane.end(phase === "stopped" ? "Stopped" : "Ended early", "stopped");
    }
  }

  /** Buttons that only change how the texts look; their state is a class on the board. */
  function bindSwitches(element) {
    const root = element.querySelector(".bass-lanes");
    for (const button of element.querySelectorAll(".switch")) {
      const apply = (pressed) => {
        button.setAttribute("aria-pressed", String(pressed));
        root.classList.toggle(button.dataset.switch, pressed);
      };
      apply(button.getAttribute("aria-pressed") === "true");
      button.addEventListener("click", () => apply(button.getAttribute("aria-pressed") !== "true"));
    }
  }

  window.Bass.mountLanes = (element) => {
    bindSwitches(element);
    new Board(element);
  };
})();
