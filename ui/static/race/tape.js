/* Records everything that the page has shown of a run, returns to any instant of it, and plays recorded runs. Draws
   nothing. The file format is that of ui/recordings/recording.py.
   - An instant is a view together with the log's lines that came with it.
   - While the page shows an earlier instant, it is "away": values from the server are held back, and nothing is lost.
   - To show an instant, the events of the run are sent again. A start with the head of the current run means a jump back
     in it. The event instant follows once all of a jump was sent. At the last instant of a finished run, its last phase is
     sent again too. */
(() => {
  "use strict";
  const { on, tell, over, player: server } = window.Bass;
  const FORMAT = 6, TICK_MS = 33;
  // If there are more instants than this, every second one is dropped.
  const MAX_INSTANTS = 600;
  // Longer pauses of the recorded machine are cut to this, in ms.
  const LONGEST_MS = 1000;
  // replaying: whether events are being sent again. own: the visitor's run, while a recording is shown.
  let tape = null, own = null, replaying = false, speed = 1, held = false;
  const playing = { timer: null, ticked: 0, since: 0, resume: false };

  // A new tape. `waiting` has the lines whose view has not arrived yet.
  const empty = (head, more) => ({
    head, waiting: [], shown: [], charts: null, ended: null, recorded: null, now: -1, away: false, ...more,
  });

  on("start", (head) => {
    if (replaying) return;
    pause();
    [tape, own] = [empty(head), null];
  });
  on("text", (line) => tape.waiting.push(line));
  on("view", (view) => {
    if (replaying || tape?.head.run !== view.run) return;
    tape.shown.push({ lines: tape.waiting, view, cache: tape.charts?.cache });
    tape.waiting = [];
    if (tape.shown.length > MAX_INSTANTS) tape.shown = thinned(tape.shown);
    tape.now = tape.shown.length - 1;
  });
  on("charts", (charts) => {
    if (replaying || tape?.head.run !== charts.run) return;
    tape.charts = charts;
    if (tape.shown.length) tape.shown.at(-1).cache = charts.cache;
  });
  on("phase", (phase) => {
    if (replaying) return;
    if (phase === "waiting") pause();
    else if (over(phase) && tape && !tape.recorded) tape.ended ??= phase;
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
    const { charts, head: { run } } = tape, { view, cache } = tape.shown[i];
    if (i === tape.shown.length - 1) return { ...charts, run, cache };
    const lanes = (group, x) => Object.fromEntries(Object.entries(group)
      // Allow 1e-3 ms more, because the charts' times are rounded.
      .map(([name, columns]) => [name, upTo(columns, x, (view.lanes[name]?.clock_ms ?? 0) + 1e-3)]));
    return {
      ...charts, run, cache, lanes: lanes(charts.lanes, "clock_ms"), rounds: lanes(charts.rounds, "time_ms"),
      series: upTo(charts.series, "elapsed_ms", view.elapsed_ms + 0.1),
    };
  }

  /** Show instant `i`. `jumped` is false if the page shows the instant just before it, as while playing. */
  function show(i, jumped = true) {
    const last = tape.shown.length - 1, { now, head, shown, waiting } = tape;
    const back = now < 0 || i < now;
    const lines = [...shown.slice(back ? 0 : now + 1, i + 1).flatMap((instant) => instant.lines), ...(i === last ? waiting : [])];
    replaying = true;
    try {
      if (back) tell("start", head);
      tell("line", merged(lines));
      tell("view", { ...shown[i].view, run: head.run });
      if (tape.charts) tell("charts", chartsAt(i));
      tape.now = i;
      if (i === last && tape.ended) tell("phase", tape.ended);
      tell("instant", { jumped });
    } finally {
      replaying = false;
    }
  }

  /** Hold the server's values back, so that an earlier instant can be shown. */
  function leave() {
    if (tape.recorded || tape.away) return;
    server.hold(true);
    tape.away = true;
  }

  /** Show instant `i` of the run. The last one of the visitor's own run is the live page. */
  function jump(i) {
    if (!tape?.shown.length) return;
    const last = tape.shown.length - 1, to = Math.max(0, Math.min(i, last));
    if (to === last && !tape.recorded) return live();
    if (to === tape.now) return;
    leave();
    playing.since = 0;
    show(to);
  }

  /** Show the newest instant: the live page for the visitor's own run, the end for a recording. */
  function live() {
    pause();
    if (!tape?.shown.length || !(tape.away || tape.recorded)) return;
    const last = tape.shown.length - 1;
    if (tape.now !== last) show(last);
    if (!tape.away) return;
    tape.away = false;
    server.hold(held);
    tell("instant", { jumped: true });
  }

  const elapsed = (i) => tape.shown[i].view.elapsed_ms;

  function tick() {
    const now = performance.now(), last = tape.shown.length - 1;
    playing.since += (now - playing.ticked) * speed;
    playing.ticked = now;
    let to = tape.now;
    while (to < last) {
      const wait = to < 0 ? 0 : Math.min(Math.max(0, elapsed(to + 1) - elapsed(to)), LONGEST_MS);
      if (wait > playing.since) break;
      playing.since -= wait;
      to += 1;
    }
    if (to === last) {
      pause();
      if (tape.recorded) show(last, false);
      else live();
    } else if (to !== tape.now) show(to, false);
  }

  /** Play from the current instant, or from the first one if it is the last. */
  function play() {
    if (!tape?.shown.length || playing.timer !== null || held) return;
    if (tape.recorded) tell("phase", "playing");
    if (tape.now === tape.shown.length - 1) {
      leave();
      // Show the first instant at once, unless it is also the last.
      if (tape.shown.length > 1) show(0);
      else tape.now = -1;
    }
    Object.assign(playing, { since: 0, ticked: performance.now(), timer: setInterval(tick, TICK_MS) });
    tell("instant", { jumped: false });
  }

  function pause() {
    if (playing.timer === null) return;
    clearInterval(playing.timer);
    playing.timer = null;
    tell("instant", { jumped: false });
  }

  /** Make a recording the current tape. If the file has no caches for an instant, they are those of the
      instant before. */
  function load(document, offer) {
    if (tape && !tape.recorded) {
      live();
      own = tape;
    }
    pause();
    const { head, charts, ended, about, made } = document;
    let cache = null;
    const shown = document.snapshots.map((instant) => ({ ...instant, cache: (cache = instant.cache ?? cache) }));
    // A new run name each time, because plots keep their zoom and their pause as long as the run is the same.
    tape = empty({ ...head, run: `${offer.name} ${performance.now()}` }, { charts, ended, shown, recorded: { ...offer, about, made, run: head.run } });
  }

  /** Show the visitor's own run again. */
  function back() {
    if (!own) return;
    pause();
    [tape, own] = [own, null];
    tape.now = -1;
    show(tape.shown.length - 1);
  }

  /** The run as the text of a file (ui/recordings/recording.py). `more` contains about and made. */
  function asRecording(more) {
    const { waiting, shown, ended, recorded } = tape, { looks, keywords, reference, ...head } = tape.head;
    const { run, cache: newest, ...charts } = tape.charts ?? { series: { elapsed_ms: [] }, lanes: {}, rounds: {}, device: {} };
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

  Object.assign(window.Bass, {
    hold(on) {
      held = on;
      if (!tape?.away && !tape?.recorded) server.hold(on);
      else if (on) {
        playing.resume = playing.timer !== null;
        pause();
      } else if (playing.resume) play();
      tell("instant", { jumped: false });
    },
    next() {
      if (!tape?.away && !tape?.recorded) return server.next();
      if (tape.now >= tape.shown.length - 1) return false;
      show(tape.now + 1, false);
      return true;
    },
    halfSpeed(on) {
      speed = on ? 0.5 : 1;
      server.halfSpeed(on);
    },
    tape: {
      jump, live, play, pause, load, back, asRecording, elapsed,
      get speed() {
        return speed;
      },
      set speed(value) {
        speed = value;
      },
      /** The state of the tape: {count, now, away, playing, recorded, own, ended, held}. */
      get state() {
        return {
          count: tape?.shown.length ?? 0, now: tape?.now ?? -1, away: Boolean(tape?.away), playing: playing.timer !== null,
          recorded: tape?.recorded ?? null, own: Boolean(own), ended: tape?.ended ?? null, held,
        };
      },
    },
  });

  // In the capture phase, before other listeners: when a race starts or ends, the page must show the newest instant.
  document.addEventListener("click", (event) => {
    if (!event.target.closest("#run, #stop") || !tape) return;
    if (tape.recorded) pause();
    else if (tape.away) live();
  }, true);
})();
