/* The playhead: the race time that the page shows (times.js). It follows a live race, plays at a chosen speed, and goes to
   any time or event. Draws nothing: the event playhead tells {ms, speed, playing, follows, moving}, once per drawing.
   - tape.timeOf(lane) is the race time of a lane at the playhead. Lanes, axis and code draw only what is not later.
     While the page follows a live race, each lane's time grows steadily until the next snapshot is due.
   - tape.roundAt(lane) is the lane's round at the playhead, or null. tape.stepAt(lane, row) is the newest round
     of a row in which it drafted, as {round, row}.
   - tape.spansAt(lane, row) and .tokensAt(lane, row) are how many pieces and tokens of a row are written by then.
   - The figures are those of the newest instant that is not later than the playhead. The run (run.js) has all rounds up
     to the playhead, and at most one snapshot more: those up to tape.clockAt(lane) have ended by then.
   - Links and other scripts: tape.seek(ms), .speed = 0.1, .play(), .pause(), .step(1), .live(), .jump(instant).
   - From Run until their race begins, the playhead stays where it is: reaching an end would pass for the end of that race.
   - The event touched tells that the visitor took over the playhead. */
import { on, tell, soon, over, bisect, player as server } from "bass/page/page.js";
import { run } from "bass/race/run.js";
import { EPSILON } from "bass/race/times.js";
import { tape } from "bass/race/tape.js";

const TICK_MS = 30;
// Longer pauses of this page are cut to this, in ms. SETTLED_MS: the figures follow a dragged playhead once it rests.
const LONGEST_MS = 1000, SETTLED_MS = 120;
const SNAPSHOT_MS = 100, SPAN_MS = [30, 400];
const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");
// follows: whether the page shows a live race. limit: the lanes' times at an instant, after a jump to it. held: whether
// the step-by-step view freezes the page. pending: whether the visitor's race was requested and has not begun.
const head = {
  ms: 0, speed: 1, timer: null, ticked: 0, follows: false, limit: null, held: false, resume: false, settling: null, pending: false,
};
// Following: the lanes' times at the last two snapshots, when the newest one arrived, and when the next is due.
let feed = { from: {}, to: {}, arrived: 0, span: SNAPSHOT_MS };

const playing = () => head.timer !== null;

/** Share of the way from the previous snapshot to the newest one that is shown now. */
function share() {
  if (document.hidden || STILL.matches || !feed.arrived) return 1;
  return Math.min(1, (performance.now() - feed.arrived) / feed.span);
}

function timeOf(name) {
  if (!head.follows) return Math.min(head.ms, head.limit?.[name] ?? Infinity);
  const from = feed.from[name] ?? 0, to = feed.to[name] ?? 0;
  return from + share() * (to - from);
}

function draw() {
  const { race } = tape;
  if (!race) return;
  if (head.follows) head.ms = Math.max(0, ...[...race.lanes.keys()].map(timeOf));
  tell("playhead", { ms: head.ms, speed: head.speed, playing: playing(), follows: head.follows, moving: playing() || head.follows && !tape.facts.ended });
  if (head.follows && share() < 1) soon(draw);
}

on("line", () => {
  if (tape.replaying || !head.follows) return;
  const now = performance.now();
  if (feed.arrived) feed.span = Math.min(SPAN_MS[1], Math.max(SPAN_MS[0], 0.7 * feed.span + 0.3 * (now - feed.arrived)));
  Object.assign(feed, { from: feed.to, to: tape.race.clocks, arrived: now });
  soon(draw);
});

/** The instant with the newest figures at `ms`, and the first one with all rounds up to it. */
function instantsAt(ms) {
  const { count } = tape.facts, { clocks } = tape.race, names = Object.keys(clocks);
  const late = bisect(count, (i) => Math.max(...Object.values(tape.clocks(i))) <= ms + EPSILON);
  const short = bisect(count, (i) => names.some((name) => tape.clocks(i)[name] < Math.min(ms, clocks[name]) - EPSILON));
  return [Math.max(0, late - 1), Math.min(count - 1, Math.max(short, late - 1))];
}

/** Let the rest of the page show the time of the playhead. */
function settle(jumped) {
  clearTimeout(head.settling);
  head.settling = null;
  const state = tape.facts;
  if (!state.count || head.follows) return;
  const [now, read] = instantsAt(head.ms);
  if (now !== state.now || read !== state.read) tape.show(now, read, jumped);
}

function tick() {
  const now = performance.now(), { race } = tape;
  head.ms = Math.min(race.end, head.ms + head.speed * Math.min(LONGEST_MS, now - head.ticked));
  Object.assign(head, { ticked: now, limit: null });
  if (head.ms >= race.end) {
    stop();
    if (!tape.facts.recorded) return live();
  }
  settle(false);
  soon(draw);
}

function stop() {
  clearInterval(head.timer);
  head.timer = null;
}

/** Play from the playhead, or from the start if it is at the end. */
function play() {
  const { count, recorded } = tape.facts;
  if (!count || playing() || head.held || head.pending) return;
  if (recorded) tell("phase", "playing");
  else tape.leave();
  if (head.ms >= tape.race.end || head.follows) head.ms = 0;
  Object.assign(head, { ticked: performance.now(), timer: setInterval(tick, TICK_MS), follows: false, limit: null });
  settle(true);
  soon(draw);
  tell("instant", { jumped: false });
}

function pause() {
  if (!playing()) return;
  stop();
  soon(draw);
  tell("instant", { jumped: false });
}

/** Show the newest time: the live page for the visitor's own run, the end for a recording. */
function live() {
  pause();
  const { count, recorded, away, now } = tape.facts;
  if (!count || head.pending || !(away || recorded)) return;
  Object.assign(head, { ms: tape.race.end, limit: null, follows: !recorded });
  feed = { from: tape.race.clocks, to: tape.race.clocks, arrived: 0, span: SNAPSHOT_MS };
  const last = count - 1;
  if (now !== last) tape.show(last);
  soon(draw);
  if (!away) return;
  tape.away = false;
  server.hold(head.held);
  tell("instant", { jumped: true });
}

/** Go to a race time. With `drags`, the figures follow once the playhead rests. */
function seek(ms, drags = false) {
  const { count, recorded } = tape.facts;
  if (!count || head.held || head.pending) return;
  pause();
  if (!recorded && ms >= tape.race.end) return live();
  tape.leave();
  Object.assign(head, { ms: Math.max(0, Math.min(tape.race.end, ms)), follows: false, limit: null });
  if (drags) {
    clearTimeout(head.settling);
    head.settling = setTimeout(() => settle(true), SETTLED_MS);
  } else settle(true);
  soon(draw);
}

/** Go to the next (1) or previous (-1) event. After the end of a race comes its first event. */
function step(by) {
  const { race, facts: { recorded, ended } } = tape;
  if (race) seek(race.event(by > 0 && head.ms >= race.end && (recorded || ended) ? 0 : head.ms, by));
}

/** Put the playhead at instant `i`. */
function place(i) {
  Object.assign(head, { ms: Math.max(...Object.values(tape.clocks(i))), limit: tape.clocks(i), follows: false });
}

/** Show instant `i` of the run. The last one of the visitor's own run is the live page. */
function jump(i) {
  const { count, recorded, now, read } = tape.facts;
  if (!count || head.pending) return;
  const last = count - 1, to = Math.max(0, Math.min(i, last));
  if (to === last && !recorded) return live();
  tape.leave();
  place(to);
  if (to !== now || to !== read) tape.show(to);
  soon(draw);
}

// Another run, or none of it yet, is on the tape.
on("tape", (change) => {
  stop();
  clearTimeout(head.settling);
  feed = { from: {}, to: {}, arrived: 0, span: SNAPSHOT_MS };
  Object.assign(head, { ms: 0, limit: null, follows: change === "start" });
  if (change === "start") head.pending = false;
  // The visitor's race replays at real speed, whatever the speed of the recording before it.
  if (change !== "load") head.speed = 1;
  if (change === "back") {
    head.ms = tape.race.end;
    head.follows = true;
    feed.from = feed.to = tape.race.clocks;
    tape.show(tape.facts.count - 1);
  }
  soon(draw);
});
on("phase", (phase) => {
  if (phase === "waiting") {
    pause();
    clearTimeout(head.settling);
    head.pending = true;
  }
  if (!over(phase)) return;
  head.pending = false;
  if (!head.follows) return;
  // Show what has arrived of a race that was cut short.
  if (phase !== "done") feed.from = feed.to;
  soon(draw);
});

Object.defineProperties(tape, {
  /** {ms, end, speed, playing, follows, held, pending}, and what tape.js knows. */
  state: {
    get() {
      const { ms, speed, follows, held, pending } = head;
      return { ...tape.facts, ms, end: tape.race?.end ?? 0, speed, playing: playing(), follows, held, pending };
    },
  },
  speed: {
    get: () => head.speed,
    set(speed) {
      if (!(speed > 0) || speed === head.speed) return;
      head.speed = speed;
      soon(draw);
    },
  },
});
function spansAt(name, row, ms = timeOf(name)) {
  const { spans } = tape.race.lanes.get(name).rows[row];
  // At an instant, a lane may not have read its prompt yet.
  const most = head.limit ? run().lanes.get(name).sequences[row].tokens.length : Infinity;
  return bisect(spans.length, (i) => spans[i].at <= ms + EPSILON && spans[i].index < most);
}

Object.assign(tape, {
  play, pause, live, seek, step, jump, timeOf, spansAt,
  tokensAt: (name, row) => (tape.race.lanes.get(name).rows[row].spans[spansAt(name, row) - 1]?.index ?? -1) + 1,
  /** The lane's own clock, prompts included, at the end of its newest round at the playhead. */
  clockAt(name) {
    const lane = tape.race?.lanes.get(name);
    if (head.follows || !lane) return Infinity;
    const ms = timeOf(name), count = bisect(lane.ends.length, (i) => lane.ends[i].at <= ms + EPSILON);
    return lane.ends[count - 1]?.ms ?? -1;
  },
  roundAt: (name) => tape.race?.lanes.get(name)?.roundAt(timeOf(name)) ?? null,
  stepAt(name, row) {
    const steps = tape.race?.lanes.get(name)?.rows[row]?.steps ?? [], ms = timeOf(name);
    return steps[bisect(steps.length, (i) => steps[i].round.begin < ms + EPSILON) - 1] ?? null;
  },
});

export function hold(on) {
  const { away, recorded } = tape.facts;
  head.held = on;
  if (!away && !recorded) server.hold(on);
  else if (on) {
    head.resume = playing();
    pause();
  } else if (head.resume) play();
  tell("instant", { jumped: false });
}

export function next() {
  const { away, recorded, now, count } = tape.facts;
  if (!away && !recorded) return server.next();
  if (head.pending || now >= count - 1) return false;
  place(now + 1);
  tape.show(now + 1, now + 1, false);
  soon(draw);
  return true;
}

// In the capture phase, before other listeners: when a race starts or ends, the page must show the newest instant.
document.addEventListener("click", (event) => {
  if (!event.target.closest("#run, #stop") || !tape.race) return;
  const { recorded, away } = tape.facts;
  if (recorded) pause();
  else if (away) live();
}, true);
