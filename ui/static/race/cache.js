/* The ragged cache: the growing lengths of a lane's rows, compared with their lengths if the whole batch stopped at its
   first rejection (the "ghost"). Everything is computed from the rounds.
   - A row's cells of a round are the tokens that it wrote and the drafts that were thrown away.
   - The ghost has as many rounds as the lane. In each, a row gains 1 + the fewest drafts that any row accepted, but no
     more than it wrote. For example, rows that accept 3, 1 and 2 drafts all gain 2 tokens. A row that ended in the middle
     of its accepted drafts does not limit the others.
   - It shows rounds that have ended by the playhead. It draws only while the picture is in sight. */
import { on, number, setText, make, bisect, whole } from "bass/page/page.js";
import { run, sum, offerLanes, verdicts, lookOf } from "bass/race/run.js";
import { tape } from "bass/race/tape.js";
import { plots } from "bass/page/plots.js";

// Bounds of a cell's width in pixels. Between them, it is the width of the track / max_new_tokens.
const CELL = { least: 4, most: 14 };
const known = new WeakMap();

/** The cells that a step adds after the row's old length, as [kind, count]: written tokens and rejected drafts. */
function cellsOf(step, tokens) {
  const cells = [], add = (kind, count) => {
    if (cells.at(-1)?.[0] === kind) cells.at(-1)[1] += count;
    else if (count > 0) cells.push([kind, count]);
  };
  const written = tokens.slice(step.start, step.start + step.written);
  for (const { origin } of written) add(origin, 1);
  const thrown = step.drafts.length - written.filter(({ origin }) => origin === "accepted").length;
  const notTested = run().head.together && !step.parents ? 0 : verdicts(step).filter((verdict) => verdict === "untested").length;
  const untested = Math.min(thrown, notTested);
  add("rejected", thrown - untested);
  add("untested", untested);
  return cells;
}

/** A function that returns how many tokens a row gains in a round with one common stop. */
function commonGain(steps) {
  const going = steps.filter(({ accepted, written }) => written > accepted);
  const least = Math.min(...(going.length ? going : steps).map(({ accepted }) => accepted));
  return ({ written }) => Math.min(written, 1 + least);
}

/** A lane's frames, one per round: {round, lengths, ghosts, cells}. The last three are lists with an entry per row. A row
    that took no part in the round has no cells. */
function framesOf(lane) {
  if (!known.has(lane)) known.set(lane, { frames: [], next: lane.sequences.map(() => 0) });
  const { frames, next } = known.get(lane);
  for (const round of lane.rounds.slice(frames.length)) {
    const before = frames.at(-1), steps = new Map();
    lane.sequences.forEach(({ steps: all }, row) => {
      if (all[next[row]]?.time_ms !== round.time_ms) return;
      steps.set(row, all[next[row]]);
      next[row] += 1;
    });
    const gain = commonGain([...steps.values()]);
    const grown = (old, by) => lane.sequences.map((_, row) => (old?.[row] ?? 0) + (steps.has(row) ? by(steps.get(row)) : 0));
    frames.push({
      round, lengths: grown(before?.lengths, ({ written }) => written), ghosts: grown(before?.ghosts, gain),
      cells: lane.sequences.map(({ tokens }, row) => (steps.has(row) ? cellsOf(steps.get(row), tokens) : null)),
    });
  }
  return frames;
}

const tokens = (count) => `${number(count, 0)} ${count === 1 ? "token" : "tokens"}`;

/** A frame in words. */
function sentence({ round, lengths, ghosts, cells }, rounds) {
  const took = cells.filter(Boolean), all = took.flat();
  const count = (...kinds) => sum(all.filter(([kind]) => kinds.includes(kind)).map(([, cell]) => cell));
  const accepted = count("accepted"), thrown = count("rejected", "untested");
  const head = round.kind === "prefill" ? "The prompt has been read: each row has its first token." :
    `Round ${round.round} of ${rounds}, ${took.length} ${took.length === 1 ? "row" : "rows"}: ` +
    (accepted + thrown ? `${accepted} drafts accepted, ${thrown} thrown away.` : "nothing was drafted.");
  const own = sum(lengths), ghost = sum(ghosts);
  const ratio = own > ghost ? `: separate lengths give ${number(own / ghost, 2)} times as many` : "";
  return `${head} So far ${tokens(own)}. With one common stop, the same rounds would have written ${number(ghost, 0)}${ratio}.`;
}

/** One row: its bar, the cells of the round, the ghost below, and both lengths. */
class Row {
  constructor(list, index) {
    this.item = make("li", "cache-row");
    this.track = make("div", "cache-track");
    this.past = make("i", "cell-past");
    this.ghost = make("i", "cell-ghost");
    this.figures = make("span", "cache-figures");
    this.item.append(make("span", "cache-name", `Row ${index + 1}`), this.track, this.figures);
    this.track.append(this.past, this.ghost);
    this.runs = [];
    list.append(this.item);
  }

  /** Draw the cells from index `from` on, `cell` pixels each. */
  draw({ lengths, ghosts, cells }, row, from, cell) {
    const own = cells[row] ?? [], written = sum(own.filter(([kind]) => kind !== "rejected" && kind !== "untested").map(([, n]) => n));
    const stretch = (element, begin, end) => {
      const left = Math.max(begin, from);
      element.style.left = `${(left - from) * cell}px`;
      element.style.width = `${Math.max(0, end - left) * cell}px`;
    };
    let at = lengths[row] - written;
    stretch(this.past, 0, at);
    stretch(this.ghost, 0, ghosts[row]);
    while (this.runs.length < own.length) this.track.append(this.runs[this.runs.push(make("i")) - 1]);
    this.runs.forEach((element, i) => {
      const [kind, count] = own[i] ?? ["", 0];
      element.className = `cell cell-${kind}`;
      element.dataset.cells = count;
      element.hidden = !count;
      stretch(element, at, at + count);
      at += count;
    });
    setText(this.figures, `${lengths[row]} / ${ghosts[row]}`);
    Object.assign(this.item.dataset, { length: lengths[row], ghost: ghosts[row] });
  }
}

class Cache {
  constructor(element) {
    this.element = element;
    this.pick = element.querySelector("select");
    this.at = element.querySelector("input[type=range]");
    this.list = element.querySelector(".cache-rows");
    this.line = element.querySelector(".cache-line");
    this.seen = false;
    this.draw = this.draw.bind(this);
    this.pick.addEventListener("change", () => this.follow());
    this.at.addEventListener("input", () => {
      this.following = this.at.value === this.at.max;
      this.draw();
    });
    on("start", (head) => this.start(head));
    on("playhead", () => this.seen && this.frames().length !== this.count && this.draw());
    whole(this.draw);
    plots.onTheme(() => this.draw());
    new IntersectionObserver((entries) => {
      this.seen = entries.at(-1).isIntersecting;
      if (this.seen) this.draw();
    }).observe(element);
    new ResizeObserver(() => this.seen && this.draw()).observe(this.list);
  }

  /** Prepare for a run. Hide the part if the batch has only one row, because no other row can limit that row. */
  start(head) {
    const { lanes, batch_size: count } = head, chosen = this.pick.value, again = this.head === head;
    this.head = head;
    this.element.hidden = count < 2;
    const batched = lanes.find((name) => lookOf(name).lengths === "batch");
    offerLanes(this.pick, lanes);
    this.pick.value = again ? chosen : batched ?? lanes.at(-1);
    this.list.replaceChildren();
    this.list.classList.toggle("many", count > 8);
    this.rows = Array.from({ length: count }, (_, i) => new Row(this.list, i));
    setText(this.line, "No round yet.");
    this.follow();
  }

  follow() {
    this.following = true;
    this.draw();
  }

  /** The frames of the chosen lane up to the playhead. */
  frames() {
    const lane = run()?.lanes.get(this.pick.value), frames = lane ? framesOf(lane) : [], clock = tape.clockAt(lane?.name);
    return frames.slice(0, bisect(frames.length, (i) => frames[i].round.time_ms <= clock));
  }

  draw() {
    const lane = run()?.lanes.get(this.pick.value);
    if (!lane || this.element.hidden) return;
    this.element.style.setProperty("--lane", `var(--${lookOf(lane.name).colour})`);
    const frames = this.frames();
    this.count = frames.length;
    this.at.max = Math.max(0, frames.length - 1);
    if (this.following) this.at.value = this.at.max;
    this.at.disabled = frames.length < 2;
    const frame = frames[Number(this.at.value)];
    if (!frame) return setText(this.line, "No round yet.");
    const width = this.rows[0].track.clientWidth, ends = frame.lengths.map((length, row) =>
      length + sum((frame.cells[row] ?? []).filter(([kind]) => kind === "rejected" || kind === "untested").map(([, n]) => n)));
    const end = Math.max(...ends), fullLength = Math.max(run().head.settings.max_new_tokens ?? 0, end);
    const cell = Math.min(CELL.most, Math.max(CELL.least, Math.floor(width / fullLength)));
    this.list.style.setProperty("--cell", `${cell}px`);
    const from = Math.max(0, end - Math.floor(width / cell));
    this.rows.forEach((row, i) => row.draw(frame, i, from, cell));
    setText(this.line, sentence(frame, frames.at(-1).round.round));
  }
}

export const mountCache = (root) => new Cache(root.querySelector(".cache-part"));
