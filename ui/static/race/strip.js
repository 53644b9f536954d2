/* Timelines of the lanes' time: one track each for target, draft and host, and above them the tokens that each round wrote.
   - A round's block begins at the end of the previous round and ends at its `time_ms`. It contains draft_ms, then verify_ms,
     then the remaining host time. If draft and target work at the same time, the blocks are the lane's own spans
     (bass_core/decode/overlapped/timeline.py).
   - All timelines share one scale: the newest part of the lanes' clocks (one of SPANS), or the whole race.
   - A timeline in sight is drawn once for each view that arrives. At the end all are drawn.
   - figure.blocks lists the drawn blocks: {row, kind, x, width, begin, end, round}, with x and width in CSS pixels from the
     canvas's left edge, begin and end in ms. With a larger font size, the drawing and these pixels are scaled. */
(() => {
  "use strict";
  const { on, soon, over, number, bisect, setText, run, plots, laneName, clock, sum, wear, writtenIn } = window.Bass;
  // Possible spans in ms. At most about ROUNDS rounds of the lane with the shortest rounds fit, so that their numbers are legible.
  const SPANS = [50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 60_000], ROUNDS = 26;
  const GUTTER = 42, HEIGHT = 60;
  const TRACKS = { target: { y: 15, height: 18 }, draft: { y: 35, height: 12 }, host: { y: 51, height: 6 } };
  // Opacity of the fill of blocks, below their hatching.
  const PALE = { plain: 0.35, draft: 0.35, unsplit: 0.5 };
  const PARTS = { draft: "drafts", verify: "\u25a0 verification", plain: "\u25a8 plain steps", host: "host" };

  const seconds = (ms) => `${number(ms / 1000, ms < 100 ? 2 : 1).replace(/\.0$/, "")} s`;

  // A round narrower than this many pixels is drawn together with its neighbours.
  const LEAST_WIDTH = 2;
  const laid = new WeakMap();

  /** A lane's rounds as {round, kind, begin, end, draft, target}, where unknown parts are null, and the sums of the parts. */
  function roundsOf(lane) {
    if (!laid.has(lane)) laid.set(lane, { rounds: [], sums: { draft: 0, verify: 0, plain: 0, host: 0 } });
    const { rounds, sums } = laid.get(lane);
    for (const round of lane.rounds.slice(rounds.length)) {
      const begin = rounds.at(-1)?.end ?? 0, { kind, time_ms: end, draft_ms: draft, verify_ms: target } = round;
      rounds.push({ round, kind, begin, end, draft, target });
      if (draft === null) continue;
      sums.draft += draft;
      sums[kind] += target;
      sums.host += Math.max(0, end - begin - draft - target);
    }
    return laid.get(lane);
  }

  /** Join rounds that are too narrow to be seen. Their parts add up as if they were one round. */
  function joined(rounds, pixels) {
    const blocks = [];
    for (const round of rounds) {
      const last = blocks.at(-1), joinable = last && last.kind !== "prefill" && round.kind !== "prefill";
      if (joinable && (last.end - last.begin) * pixels < LEAST_WIDTH) {
        const both = (a, b) => (a === null || b === null ? null : a + b);
        blocks[blocks.length - 1] = { ...last, kind: round.kind === "plain" ? last.kind : round.kind, end: round.end,
          draft: both(last.draft, round.draft), target: both(last.target, round.target), many: true };
      } else blocks.push(round);
    }
    return blocks;
  }

  /** The parts of a round as [track, kind, begin, end], in ms. */
  function partsOf({ kind, begin, end, draft, target }) {
    if (kind === "prefill") return [["target", "prefill", begin, end]];
    if (draft === null) return [["target", "unsplit", begin, end]];
    const drafted = Math.min(end, begin + draft), verified = Math.min(end, drafted + target);
    return [["draft", "draft", begin, drafted], ["target", kind, drafted, verified], ["host", "host", verified, end]]
      .filter(([, , from, to]) => to > from);
  }

  /** Index of the first round that ends after `ms`. */
  const firstAfter = (rounds, ms) => bisect(rounds.length, (i) => rounds[i].end <= ms);

  /** One round in words. */
  function describe({ round, kind, begin, end, draft, target }) {
    const ms = (value) => number(value, 1), written = writtenIn(round), wrote = `${written} ${written === 1 ? "token" : "tokens"}`;
    if (kind === "prefill") return `${wear("Reading the prompt")}: ${ms(end - begin)} ms`;
    const head = `${wear(`Round ${round.round}`)}: ${ms(end - begin)} ms`;
    if (draft === null) return `${head}, ${wrote}`;
    const host = `host ${ms(Math.max(0, end - begin - draft - target))}`;
    const own = kind === "plain" ? `plain step ${ms(target)}` : `verification ${ms(target)}`;
    const forwards = round.draft_forwards, by = forwards ? ` by ${forwards} ${forwards === 1 ? "forward" : "forwards"}` : "";
    return `${head} = ${draft ? `drafts ${ms(draft)}${by} + ` : ""}${own} + ${host}; ${wrote}`;
  }

  /** A pattern of diagonal lines, so that a block can be recognised without its colour. */
  function hatch(context, colour, step) {
    const tile = Object.assign(document.createElement("canvas"), { width: step, height: step });
    const pen = tile.getContext("2d");
    pen.strokeStyle = colour;
    pen.lineWidth = step / 3;
    pen.lineCap = "square";
    for (const shift of [-step, 0, step]) {
      pen.moveTo(shift, step);
      pen.lineTo(shift + step, 0);
    }
    pen.stroke();
    return context.createPattern(tile, "repeat");
  }

  class Strip {
    constructor(section, board) {
      Object.assign(this, { section, board, name: section.dataset.lane, seen: true, at: null });
      this.figure = section.querySelector(".strip");
      this.canvas = this.figure.querySelector("canvas");
      this.caption = this.figure.querySelector("figcaption");
      const about = "arrow keys select a round, Enter opens it";
      this.canvas.setAttribute("aria-label", `Timeline of ${laneName(this.name)}: ${about}`);
      this.canvas.addEventListener("pointermove", (event) => this.point(this.roundAt(event)));
      this.canvas.addEventListener("pointerleave", () => this.point(null));
      this.canvas.addEventListener("blur", () => this.point(null));
      this.canvas.addEventListener("click", (event) => this.open(this.roundAt(event)));
      this.canvas.addEventListener("keydown", (event) => this.key(event));
      new IntersectionObserver((entries) => {
        this.seen = entries.at(-1).isIntersecting;
        this.draw();
      }).observe(this.figure);
      // Observe the width, because reading it from the canvas would lay out all texts before each drawing.
      new ResizeObserver(([{ contentRect }]) => {
        this.wide = Math.round(contentRect.width);
        this.draw(true);
      }).observe(this.canvas);
    }

    get lane() {
      return run()?.lanes.get(this.name);
    }

    /** The shown part of the lane's clock, in ms. */
    get range() {
      if (this.board.whole) return [0, Math.max(this.board.longest, 1)];
      const { span } = this.board, from = Math.max(0, this.lane.clock - span);
      return [from, from + span];
    }

    /** Draw the newest state if it is in view, or with `anyway` even if it is not. */
    draw(anyway = false) {
      const size = plots.type(), width = (anyway ? this.canvas.clientWidth : this.wide ?? 0) / size;
      if (!this.lane || !(this.seen || anyway) || !width || this.figure.hidden) return;
      const context = this.canvas.getContext("2d"), fine = document.body.classList.contains("printing") ? 3 : 1;
      const ratio = size * Math.max(window.devicePixelRatio || 1, fine);
      if (this.canvas.width !== Math.round(width * ratio)) this.canvas.width = Math.round(width * ratio);
      if (this.canvas.height !== Math.round(HEIGHT * ratio)) this.canvas.height = Math.round(HEIGHT * ratio);
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      context.clearRect(0, 0, width, HEIGHT);
      this.look ??= this.looks(context);
      const [from, to] = this.range, scale = (width - GUTTER) / (to - from);
      Object.assign(this.figure.dataset, { from, to });
      this.ground(context, width);
      this.figure.blocks = this.blocks(from, to, scale);
      this.paint(context, scale);
      this.marks(context, from, scale);
      if (!this.at) setText(this.caption, this.words(from, to));
    }

    /** The look of each kind of block. */
    looks(context) {
      const colour = plots.palette(this.section), lane = colour("lane") || colour("soft");
      const own = getComputedStyle(this.section).getPropertyValue("--lane").trim() || lane;
      return {
        colour, verify: own, plain: hatch(context, own, 4), target: own, draft: hatch(context, own, 6),
        host: colour("soft"), prefill: hatch(context, colour("soft"), 8), edge: own,
      };
    }

    /** Draw the tracks and their names. */
    ground(context, width) {
      const { colour } = this.look;
      context.font = `11px ${colour.font}`;
      context.textBaseline = "middle";
      for (const [name, { y, height }] of Object.entries(TRACKS)) {
        if (name === "host" && this.spans) continue;
        context.fillStyle = colour("well");
        context.fillRect(GUTTER, y, width - GUTTER, height);
        context.fillStyle = colour("soft");
        context.textAlign = "left";
        context.fillText(name, 0, y + height / 2 + 0.5);
      }
    }

    /** The blocks of [from, to], in the format of figure.blocks. */
    blocks(from, to, scale) {
      const block = (row, kind, begin, end, round) => ({
        row, kind, x: GUTTER + (Math.max(begin, from) - from) * scale,
        width: (Math.min(end, to) - Math.max(begin, from)) * scale, begin, end, round,
      });
      if (this.spans) {
        return ["target", "draft"].flatMap((row) => this.spans[row].filter(([begin, end]) => end > from && begin < to)
          .map(([begin, end]) => block(row, row, begin, end, null)));
      }
      const { rounds } = roundsOf(this.lane), seen = rounds.slice(firstAfter(rounds, from));
      return joined(seen, scale).flatMap((round) => partsOf(round).filter(([, , , end]) => end > from)
        .map(([row, kind, begin, end]) => block(row, kind, begin, end, round.many ? null : round.round)));
    }

    paint(context, scale) {
      for (const { row, kind, x, width } of this.figure.blocks) {
        const { y, height } = TRACKS[row];
        if (kind in PALE) {
          context.fillStyle = this.look.edge;
          context.globalAlpha = PALE[kind];
          context.fillRect(x, y, width, height);
          context.globalAlpha = 1;
        }
        context.fillStyle = this.look[kind];
        if (kind !== "unsplit") context.fillRect(x, y, width, height);
        if (width < 3 || kind === "host") continue;
        context.strokeStyle = kind === "prefill" ? this.look.host : this.look.edge;
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, y + 0.5, width - 1, height - 1);
      }
      const bad = this.look.colour("bad");
      for (const at of this.spans?.rollbacks ?? []) {
        const x = GUTTER + (at - this.range[0]) * scale;
        if (x < GUTTER) continue;
        context.fillStyle = bad;
        context.fillRect(x - 1, TRACKS.draft.y - 2, 2.5, TRACKS.draft.height + 4);
      }
    }

    /** Draw each round's tokens above it, if there is room, and a frame around the selected round. */
    marks(context, from, scale) {
      const { rounds } = roundsOf(this.lane), { colour } = this.look;
      context.textAlign = "center";
      context.fillStyle = colour("ink");
      for (const { round, kind, begin, end } of rounds.slice(firstAfter(rounds, from))) {
        const left = Math.max(begin, from), text = kind === "prefill" ? "prompt" : `${writtenIn(round)}`;
        if ((end - left) * scale < 2 + 6.2 * text.length) continue;
        context.fillText(text, GUTTER + ((left + end) / 2 - from) * scale, 7.5);
      }
      if (!this.at || this.at.end <= from) return;
      const left = GUTTER + (Math.max(this.at.begin, from) - from) * scale;
      context.strokeStyle = colour("ink");
      context.lineWidth = 1.5;
      context.strokeRect(left, 14, Math.max(2, GUTTER + (this.at.end - from) * scale - left), HEIGHT - 15);
    }

    /** The caption: the part that is shown, and the shares of the time so far. */
    words(from, to) {
      const shown = (clock() ? "Predicted. " : "") + (this.board.whole ? `The whole race, ${seconds(to)}` : `Newest ${seconds(to - from)}`);
      const { spans, lane } = this, busy = (ms) => number(lane.clock > 0 ? 100 * ms / lane.clock : null, 0, " %");
      if (spans) {
        return spans.note ?? `${shown}. So far: target (above) busy ${busy(spans.target_busy_ms)}, draft (below) ` +
          `${busy(spans.draft_busy_ms)}; ${spans.rolled_back} roll-backs (red lines), ${spans.thrown_away} drafts thrown away`;
      }
      const { sums } = roundsOf(lane), all = sum(Object.values(sums));
      const shares = Object.entries(PARTS).filter(([key]) => sums[key] > 0.005 * all)
        .map(([key, name]) => `${name} ${number(100 * sums[key] / all, 0, "\u00a0%")}`);
      return `${shown}.${shares.length ? ` Rounds: ${shares.join(", ")}` : ""}`;
    }

    /** The round under the pointer. */
    roundAt(event) {
      if (!this.lane) return null;
      const [from, to] = this.range, box = this.canvas.getBoundingClientRect(), gutter = GUTTER * plots.type();
      const at = from + (event.clientX - box.left - gutter) * (to - from) / (box.width - gutter);
      const { rounds } = roundsOf(this.lane), entry = rounds[firstAfter(rounds, at)];
      return entry && at >= entry.begin && at >= from ? entry : null;
    }

    /** Select a round. The caption then shows its numbers. */
    point(entry) {
      if (entry === this.at) return;
      this.at = entry;
      this.canvas.classList.toggle("chosen", Boolean(entry && entry.kind !== "prefill"));
      if (entry) setText(this.caption, describe(entry));
      soon(this.board.newest);
    }

    /** Open a round in the inspector. */
    open(entry) {
      if (!entry || entry.kind === "prefill") return;
      const { sequences } = this.lane;
      for (const [i, { steps }] of sequences.entries()) {
        const step = steps.find(({ round, kind }) => round === entry.round.round && kind !== "prefill");
        if (step) return void window.Bass.inspect?.(this.name, i, step);
      }
    }

    key(event) {
      if (!this.lane) return;
      const { rounds } = roundsOf(this.lane), end = rounds.length - 1, now = rounds.indexOf(this.at);
      const next = { ArrowRight: now < 0 ? end : Math.min(now + 1, end), ArrowLeft: now < 0 ? end : Math.max(now - 1, 0),
        Home: 0, End: end }[event.key];
      if (event.key === "Enter") this.open(this.at);
      else if (event.key === "Escape") this.point(null);
      else if (next !== undefined && rounds[next]) {
        this.point(rounds[next]);
        setText(this.board.spoken, describe(rounds[next]));
      } else return;
      event.preventDefault();
    }
  }

  /** All strips, and the scale that they share. */
  class Strips {
    constructor(root) {
      Object.assign(this, { root, strips: new Map(), span: 2000, longest: 0 });
      this.spoken = root.querySelector(".board-spoken");
      this.newest = () => this.draw();
      root.querySelector("[data-switch='whole-race']").addEventListener("click", () => this.draw(true));
      on("start", (head) => this.start(head));
      on("view", (view) => this.show(view));
      on("phase", (phase) => over(phase) && this.wholeAtLast());
      window.Bass.whole(() => this.draw(true));
      plots.onTheme(() => {
        for (const strip of this.strips.values()) strip.look = null;
        this.draw(true);
      });
    }

    get whole() {
      return this.root.classList.contains("whole-race");
    }

    /** After a race, show all of it until another one starts. */
    wholeAtLast() {
      this.opened ||= !this.whole;
      this.setWhole(true);
    }

    setWhole(whole) {
      this.root.classList.toggle("whole-race", whole);
      this.root.querySelector("[data-switch='whole-race']").setAttribute("aria-pressed", String(whole));
    }

    start(head) {
      const { lanes } = head;
      if (head !== this.head && this.opened) {
        this.opened = false;
        this.setWhole(false);
      }
      setText(this.spoken, "");
      // Keep the scale after a jump back.
      if (head !== this.head) Object.assign(this, { head, span: 2000, longest: 0 });
      for (const section of this.root.querySelectorAll(".lane")) {
        const name = section.dataset.lane;
        if (!this.strips.has(name)) this.strips.set(name, new Strip(section, this));
        const strip = this.strips.get(name);
        Object.assign(strip, { at: null, spans: null });
        strip.figure.hidden = !lanes.includes(name);
      }
      soon(this.newest);
    }

    show({ lanes }) {
      for (const [name, { timeline }] of Object.entries(lanes)) {
        if (this.strips.has(name)) this.strips.get(name).spans = timeline ?? null;
      }
      soon(this.newest);
    }

    /** Update the common scale. It changes only when the rounds no longer fit it well. */
    measure() {
      const lanes = [...(run()?.lanes.values() ?? [])];
      this.longest = Math.max(0, ...lanes.map(({ clock }) => clock));
      const means = lanes.map(({ rounds }) => (rounds.length > 2 ? (rounds.at(-1).time_ms - rounds[0].time_ms) / (rounds.length - 1) : Infinity));
      const mean = Math.min(...means);
      if (!Number.isFinite(mean) || (this.span > ROUNDS / 3 * mean && this.span < 1.3 * ROUNDS * mean)) return;
      this.span = SPANS.findLast((span) => span <= ROUNDS * mean) ?? SPANS[0];
    }

    draw(anyway) {
      this.measure();
      for (const strip of this.strips.values()) strip.draw(anyway);
    }
  }

  window.Bass.mountStrips = (root) => new Strips(root);
})();
