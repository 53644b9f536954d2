/* A race in race time, for everything that is drawn as a function of it.
   - Race time is a lane's clock without the reading of prompts: at 0 the prompt has been read. So the ratio of two lanes'
     ends is the ratio of their times in the speed-up.
   - new Race(head), then add(line) for each line of the log. It always has all of the run, whatever instant the page shows.
   - A lane is {name, rounds, reads, rows, clock, reading}. A round is {record, kind, begin, end, draft, verify, written,
     total}: `draft` and `verify` in ms or null, `total` all tokens up to its end, without those of prefills. A read is
     {at, ms}: a prompt, read at race time `at`. `clock` is the end of the newest round, `reading` the sum of all reads.
   - A row is {spans, steps, ids, same, certain}. A span is {index, origin, text, id, at, certain}: a piece of text, when it was
     written, and whether it was a draft that a grammar made certain. A step is a round in which the row drafted: {round, row,
     chain}, with the indices of a line of drafts, the accepted ones first. `ids` are its token ids; `same[n]` is how many of the
     first n equal the reference lane's. `certain` has the indices of certain tokens. */
import { bisect } from "bass/page/page.js";

// Times closer than this, in ms, are the same time.
export const EPSILON = 1e-6;
const ORIGINS = { s: "sampled", a: "accepted", r: "recovered", b: "bonus" };
export const sum = (values) => values.reduce((total, value) => total + value, 0);

/** When the drafts of a round stand: they are written over their own time, or over a third of the round, which can be seen. */
export const draftedBy = ({ begin, end, draft }) => begin + Math.max(draft ?? 0, (end - begin) / 3);

/** The drafts in the order in which they are shown. Of a tree: the accepted path, then the first branch below it. */
export function chainOf({ drafted, parents, path }) {
  if (!parents) return drafted.map((_, i) => i);
  const chain = [...(path ?? [])];
  for (let next = parents.indexOf(chain.at(-1) ?? -1); next >= 0; next = parents.indexOf(next)) chain.push(next);
  return chain;
}

class LaneTimes {
  constructor(name, count) {
    Object.assign(this, { name, rounds: [], reads: [], clock: 0, reading: 0, ends: [], before: 0 });
    this.rows = Array.from({ length: count }, () => ({ spans: [], steps: [], ids: [], same: [0], certain: new Set() }));
  }

  add({ rounds, new: texts }) {
    for (const record of rounds) this.addRound(record);
    for (const [index, tokens] of Object.entries(texts)) this.addTokens(this.rows[index], tokens);
  }

  addRound(record) {
    const ms = Math.max(0, record.time_ms - this.before), written = sum(record.rows.map((row) => row.written));
    this.before = record.time_ms;
    if (record.kind === "prefill") {
      this.reads.push({ at: this.clock, ms });
      this.reading += ms;
    } else {
      const begin = this.clock, { kind, draft_ms: draft, verify_ms: verify } = record;
      this.clock += ms;
      const round = { record, kind, begin, end: this.clock, draft, verify, written, total: this.total + written };
      this.rounds.push(round);
      for (const row of record.rows) {
        const { steps, certain } = this.rows[row.sequence];
        if (row.drafted.length) steps.push({ round, row, chain: chainOf(row) });
        if (row.certain) for (let i = row.start; i < row.start + Math.min(row.written, row.drafted.length); i += 1) certain.add(i);
      }
    }
    this.ends.push({ ms: record.time_ms, at: this.clock });
  }

  addTokens(row, tokens) {
    for (const [origin, text, ms, id] of tokens) {
      // "+": text that belongs to the previous token.
      if (origin === "+") row.spans.push({ ...row.spans.at(-1), text, id: null, at: Math.max(row.spans.at(-1).at, this.raceTime(ms)) });
      else {
        const index = row.ids.push(id) - 1;
        row.spans.push({ index, origin: ORIGINS[origin], text, id, at: this.raceTime(ms), certain: row.certain.has(index) });
      }
    }
  }

  /** The race time of a time on the lane's clock at which a round ended. Times in a log have six digits. */
  raceTime(ms) {
    const slack = 1e-3 + 1e-5 * ms, at = bisect(this.ends.length, (i) => this.ends[i].ms < ms - slack);
    return this.ends[at]?.at ?? Math.max(0, ms - this.reading);
  }

  get total() {
    return this.rounds.at(-1)?.total ?? 0;
  }

  /** Index of the first round that ends after `ms`, or with `upTo`, at `ms` or later. */
  indexAt(ms, upTo = false) {
    return bisect(this.rounds.length, (i) => (upTo ? this.rounds[i].end < ms - EPSILON : this.rounds[i].end <= ms + EPSILON));
  }

  /** The round that works at `ms`, or that has just ended, or null. */
  roundAt(ms) {
    const round = this.rounds[this.indexAt(ms, true)];
    return round && round.begin < ms + EPSILON ? round : null;
  }
}

export class Race {
  constructor(head) {
    this.head = head;
    this.lanes = new Map(head.lanes.map((name) => [name, new LaneTimes(name, head.batch_size)]));
    // The most tokens that any round wrote, at least one per row.
    this.most = Math.max(1, head.batch_size);
  }

  add(line) {
    for (const [name, update] of Object.entries(line)) {
      const lane = this.lanes.get(name), known = lane.rounds.length;
      lane.add(update);
      for (let i = known; i < lane.rounds.length; i += 1) this.most = Math.max(this.most, lane.rounds[i].written);
    }
  }

  /** The race time of each lane. */
  get clocks() {
    return Object.fromEntries([...this.lanes].map(([name, { clock }]) => [name, clock]));
  }

  /** How many of the first `length` tokens of a row equal the reference lane's. */
  equal(name, row, length) {
    const { ids, same } = this.lanes.get(name).rows[row], theirs = this.lanes.get(this.head.reference).rows[row].ids;
    for (let i = same.length - 1; i < length; i += 1) same.push(same[i] + Number(ids[i] === theirs[i]));
    return same[length];
  }

  /** Index of the first of these tokens that differs, or -1. */
  difference(name, row, length) {
    const at = bisect(length, (i) => this.equal(name, row, i + 1) === i + 1);
    return at < length ? at : -1;
  }

  /** The text of a row's token `at`. */
  textAt(name, row, at) {
    const { spans } = this.lanes.get(name).rows[row], before = (index) => bisect(spans.length, (i) => spans[i].index < index);
    return spans.slice(before(at), before(at + 1)).map(({ text }) => text).join("");
  }

  /** When the last lane ended. */
  get end() {
    return Math.max(0, ...[...this.lanes.values()].map(({ clock }) => clock));
  }

  /** The nearest time after (`by` 1) or before (-1) `ms` at which something happens: a lane's drafts stand, or are judged. */
  event(ms, by) {
    const times = [];
    for (const { rounds } of this.lanes.values()) {
      const at = bisect(rounds.length, (i) => rounds[i].end <= ms + EPSILON);
      for (const round of rounds.slice(Math.max(0, at - 2), at + 2)) {
        if (round.record.rows.some(({ drafted }) => drafted.length)) times.push((round.begin + round.end) / 2);
        times.push(round.end);
      }
    }
    const later = times.filter((time) => (by > 0 ? time > ms + EPSILON : time < ms - EPSILON));
    return by > 0 ? Math.min(this.end, ...later) : Math.max(0, ...later);
  }
}

