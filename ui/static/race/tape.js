/* Records everything that the page has shown of a run, returns to any instant of it, and loads recorded runs. Draws
   nothing. The file format is that of ui/recordings/recording.py. playhead.js moves through the instants.
   - An instant is a view together with the log's lines that came with it, and the lanes' race times (times.js).
   - While the page shows an earlier instant, it is "away": values from the server are held back, and nothing is lost.
   - To show an instant, the events of the run are sent again. A start with the head of the current run means a jump back
     in it. The event instant follows once all of a jump was sent. At the last instant of a finished run, its last phase is
     sent again too. The event tape tells that another run, or another part of it, is on the tape. */
import { on, tell, over, player as server } from "bass/page/page.js";
import { Race } from "bass/race/times.js";

const FORMAT = 6;
// If there are more instants than this, every second one is dropped.
const MAX_INSTANTS = 600;
// reel: the run on the tape. replaying: whether events are being sent again. own: the visitor's run, while a recording is shown.
let reel = null, own = null, replaying = false;

// A new tape. `waiting` has the lines whose view has not arrived yet. now, read: the instants whose view and whose
// lines are shown.
const empty = (head, more) => ({
  head, race: new Race(head), waiting: [], shown: [], charts: null, ended: null, recorded: null, now: -1, read: -1,
  away: false, ...more,
});

on("start", (head) => {
  if (replaying) return;
  [reel, own] = [empty(head), null];
  tell("tape", "start");
});
on("text", (line) => reel.waiting.push(line));
on("line", (line) => replaying || reel.race.add(line));
on("view", (view) => {
  if (replaying || reel?.head.run !== view.run) return;
  reel.shown.push({ lines: reel.waiting, view, cache: reel.charts?.cache, clocks: reel.race.clocks });
  reel.waiting = [];
  if (reel.shown.length > MAX_INSTANTS) reel.shown = thinned(reel.shown);
  reel.now = reel.read = reel.shown.length - 1;
});
on("charts", (charts) => {
  if (replaying || reel?.head.run !== charts.run) return;
  reel.charts = charts;
  if (reel.shown.length) reel.shown.at(-1).cache = charts.cache;
});
on("phase", (phase) => {
  if (!replaying && over(phase) && reel && !reel.recorded) reel.ended ??= phase;
});

const parsed = (line) => (typeof line === "string" ? JSON.parse(line) : line);

/** Every second instant and the last one. The lines of a dropped instant move to the instant after it. */
function thinned(shown) {
  const stays = (i) => i % 2 === 0 || i === shown.length - 1;
  const lines = (i) => (!i || stays(i - 1) ? [] : shown[i - 1].lines);
  return shown.flatMap((instant, i) => (stays(i) ? [{ ...instant, lines: [...lines(i), ...instant.lines] }] : []));
}

/** Join several lines of the log into one, as if their snapshots had come together. */
function merged(lines) {
  const all = {};
  for (const line of lines) {
    for (const [name, update] of Object.entries(parsed(line))) {
      const lane = (all[name] ??= { clock_ms: 0, new: {}, rounds: [] });
      lane.clock_ms = update.clock_ms;
      lane.rounds.push(...update.rounds);
      for (const [index, tokens] of Object.entries(update.new)) (lane.new[index] ??= []).push(...tokens);
    }
  }
  return all;
}

/** The columns, cut after the last row whose value in column `x` is at most `end`. */
function upTo(columns, x, end) {
  const count = columns[x].filter((value) => value <= end).length;
  return Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values.slice(0, count)]));
}

/** The charts at an instant, cut from the newest ones. */
function chartsAt(i) {
  const { charts, head: { run } } = reel, { view, cache } = reel.shown[i];
  if (i === reel.shown.length - 1) return { ...charts, run, cache };
  const lanes = (group, x) => Object.fromEntries(Object.entries(group)
    // Allow 1e-3 ms more, because the charts' times are rounded.
    .map(([name, columns]) => [name, upTo(columns, x, (view.lanes[name]?.clock_ms ?? 0) + 1e-3)]));
  return {
    ...charts, run, cache, lanes: lanes(charts.lanes, "clock_ms"), rounds: lanes(charts.rounds, "time_ms"),
    series: upTo(charts.series, "elapsed_ms", view.elapsed_ms + 0.1),
  };
}

/** Show the figures of instant `now`, and the texts and rounds of instant `read`, which may be later. `jumped` is false
    if the page shows the instant just before, as while playing. */
function show(now, read = now, jumped = true) {
  const last = reel.shown.length - 1, { head, shown, waiting } = reel;
  const back = reel.read < 0 || now < reel.now || read < reel.read;
  const lines = [...shown.slice(back ? 0 : reel.read + 1, read + 1).flatMap((instant) => instant.lines), ...(read === last ? waiting : [])];
  const moved = back || now !== reel.now;
  replaying = true;
  try {
    if (back) tell("start", head);
    if (lines.length) tell("line", merged(lines));
    Object.assign(reel, { now, read });
    if (moved) tell("view", { ...shown[now].view, run: head.run });
    if (moved && reel.charts) tell("charts", chartsAt(now));
    if (moved && now === last && reel.ended) tell("phase", reel.ended);
    tell("instant", { jumped });
  } finally {
    replaying = false;
  }
}

/** Hold the server's values back, so that an earlier instant can be shown. */
function leave() {
  if (reel.recorded || reel.away) return;
  server.hold(true);
  reel.away = true;
}

/** Make a recording the current tape. If the file has no caches for an instant, they are those of the
    instant before. */
function load(document, offer) {
  if (reel && !reel.recorded) {
    tape.live();
    own = reel;
  }
  const { charts, ended, about, made } = document;
  // A new run name each time, because plots keep their zoom and their pause as long as the run is the same.
  const head = { ...document.head, run: `${offer.name} ${performance.now()}` };
  reel = empty(head, { charts, ended, recorded: { ...offer, about, made, run: document.head.run } });
  let cache = null;
  reel.shown = document.snapshots.map((instant) => {
    for (const line of instant.lines) reel.race.add(line);
    return { ...instant, cache: (cache = instant.cache ?? cache), clocks: reel.race.clocks };
  });
  tell("tape", "load");
}

/** Show the visitor's own run again. */
function back() {
  if (!own) return;
  [reel, own] = [own, null];
  reel.now = reel.read = -1;
  tell("tape", "back");
}

/** The run as the text of a file (ui/recordings/recording.py). `more` contains about and made. */
function asRecording(more) {
  const { waiting, shown, ended, recorded } = reel, { looks, keywords, reference, ...head } = reel.head;
  const { run, cache: newest, ...charts } = reel.charts ?? { series: { elapsed_ms: [] }, lanes: {}, rounds: {}, device: {} };
  head.run = recorded?.run ?? head.run;
  let before = null;
  const snapshots = shown.map(({ lines, view: { run: _, ...view }, cache }, i) => {
    const text = JSON.stringify(cache), changed = cache && text !== before;
    before = text;
    const all = i === shown.length - 1 ? [...lines, ...waiting] : lines;
    return { lines: all.map(parsed), view, ...(changed && { cache }) };
  });
  const { about, made } = recorded ?? more;
  return JSON.stringify({ recording: FORMAT, about, made, head, snapshots, charts, ended: ended ?? "stopped" });
}

export const tape = {
  show, leave, load, back, asRecording,
  /** The wall time of instant `i` on the machine of the run, in ms. */
  elapsed: (i) => reel.shown[i].view.elapsed_ms,
  /** The lanes' race times at instant `i`. */
  clocks: (i) => reel.shown[i].clocks,
  /** The whole run in race time (times.js), or null. */
  get race() {
    return reel?.race ?? null;
  },
  /** The newest view of the run, or null. */
  get last() {
    return reel?.shown.at(-1)?.view ?? null;
  },
  get replaying() {
    return replaying;
  },
  set away(away) {
    reel.away = away;
  },
  /** {count, now, read, away, recorded, own, ended, complete}. tape.state (playhead.js) has these too.
      complete: whether the page shows the last instant of a race that has ended, also by Stop or an error. */
  get facts() {
    const newest = reel?.shown.at(-1);
    return {
      count: reel?.shown.length ?? 0, now: reel?.now ?? -1, read: reel?.read ?? -1, away: Boolean(reel?.away),
      recorded: reel?.recorded ?? null, own: Boolean(own), ended: reel?.ended ?? null,
      complete: Boolean(newest && reel.now === reel.shown.length - 1 && (newest.view.done || reel.ended)),
    };
  },
};
