/* Keeps what the page has shown of a run, shows any instant of it again, and plays recorded runs. Contract: an instant is
   a view with the log's lines that came with it. While the page shows an earlier instant it is "away": what the
   server sends is held back, and nothing is lost. To show an instant, the run's events are sent again: a start with the
   head of the run that is shown is a jump back in it; instant says that all of a jump was sent. At the end of a run
   that is over, its last phase is sent again. The file's format: ui/recordings/recording.py. Draws nothing. */
(() => {
  "use strict";
  const { on, tell, over, player: server } = window.Bass;
  const FORMAT = 6, TICK_MS = 33;
  // More instants than this are thinned: every second one goes.
  const MOST = 600;
  // A longer pause of the recorded machine is cut to this, in ms.
  const LONGEST_MS = 1000;
  // telling: whether events are sent again. own: the visitor's run, while a recording is shown.
  let tape = null, own = null, telling = false, slow = false, held = false;
  const playing = { timer: null, ticked: 0, since: 0, resume: false };

  // waiting: lines whose view has not come yet.
  const empty = (head, more) => ({
    head, waiting: [], shown: [], charts: null, ended: null, recorded: null, now: -1, away: false, ...more,
  });

  on("start", (head) => {
    if (telling) return;
    pause();
    [tape, own] = [empty(head), null];
  });
  on("text", (line) => tape.waiting.push(line));
  on("view", (view) => {
    if (telling || tape?.head.run !== view.run) return;
    tape.shown.push({ lines: tape.waiting, view, cache: tape.charts?.cache });
    tape.waiting = [];
    if (tape.shown.length > MOST) tape.shown = thinned(tape.shown);
    tape.now = tape.shown.length - 1;
  });
  on("charts", (charts) => {
    if (telling || tape?.head.run !== charts.run) return;
    tape.charts = charts;
    if (tape.shown.length) tape.shown.at(-1).cache = charts.cache;
  });
  on("phase", (phase) => {
    if (telling) return;
    if (phase === "waiting") pause();
    else if (over(phase) && tape && !tape.recorded) tape.ended ??= phase;
  });

  const parsed = (line) => (typeof line === "string" ? JSON.parse(line) : line);

  /** Every second instant and the last, each with the lines of the one before it that went. */
  function thinned(shown) {
    const kept = (i) => i % 2 === 0 || i === shown.length - 1;
    const lines = (i) => (!i || kept(i - 1) ? [] : shown[i - 1].lines);
    return shown.flatMap((one, i) => (kept(i) ? [{ ...one, lines: [...lines(i), ...one.lines] }] : []));
  }

  /** Several lines as one. */
  function merged(lines) {
    const all = {};
    for (const line of lines) {
      for (const [name, news] of Object.entries(parsed(line))) {
        const lane = (all[name] ??= { clock_ms: 0, new: {}, rounds: [] });
        lane.clock_ms = news.clock_ms;
        lane.rounds.push(...news.rounds);
        for (const [index, tokens] of Object.entries(news.new)) (lane.new[index] ??= []).push(...tokens);
      }
    }
    return all;
  }

  /** Columns up to the last row whose `x` is at most `end`. */
  function upTo(columns, x, end) {
    const count = columns[x].filter((value) => value <= end).length;
    return Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values.slice(0, count)]));
  }

  /** The charts as they were at an instant, made from the newest ones. */
  function chartsAt(i) {
    const { charts, head: { run } } = tape, { view, cache } = tape.shown[i];
    if (i === tape.shown.length - 1) return { ...charts, run, cache };
    const lanes = (group, x) => Object.fromEntries(Object.entries(group)
      // Charts are rounded.
      .map(([name, columns]) => [name, upTo(columns, x, (view.lanes[name]?.clock_ms ?? 0) + 1e-3)]));
    return {
      ...charts, run, cache, lanes: lanes(charts.lanes, "clock_ms"), rounds: lanes(charts.rounds, "time_ms"),
      series: upTo(charts.series, "elapsed_ms", view.elapsed_ms + 0.1),
    };
  }

  /** Show instant `i`; `jumped`, not as the next one in time. */
  function show(i, jumped = true) {
    const last = tape.shown.length - 1, { now, head, shown, waiting } = tape;
    const back = now < 0 || i < now;
    const lines = [...shown.slice(back ? 0 : now + 1, i + 1).flatMap((one) => one.lines), ...(i === last ? waiting : [])];
    telling = true;
    try {
      if (back) tell("start", head);
      tell("line", merged(lines));
      tell("view", { ...shown[i].view, run: head.run });
      if (tape.charts) tell("charts", chartsAt(i));
      tape.now = i;
      if (i === last && tape.ended) tell("phase", tape.ended);
      tell("instant", { jumped });
    } finally {
      telling = false;
    }
  }

  /** Hold the server's values back, so that earlier ones can be shown. */
  function leave() {
    if (tape.recorded || tape.away) return;
    server.hold(true);
    tape.away = true;
  }

  /** Show instant `i` of the run; the last one of the visitor's own run is the page as it is. */
  function jump(i) {
    if (!tape?.shown.length) return;
    const last = tape.shown.length - 1, to = Math.max(0, Math.min(i, last));
    if (to === last && !tape.recorded) return live();
    if (to === tape.now) return;
    leave();
    playing.since = 0;
    show(to);
  }

  /** Show the newest: of the visitor's own run what the server sends from now on, of a recording its end. */
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
    playing.since += (now - playing.ticked) * (slow ? 0.5 : 1);
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

  /** Go on from the instant that is shown, or from the first one if it is the last. */
  function play() {
    if (!tape?.shown.length || playing.timer !== null || held) return;
    if (tape.recorded) tell("phase", "playing");
    if (tape.now === tape.shown.length - 1) {
      leave();
      // The first instant is shown at once, and never the end.
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

  /** The recording as a tape; what the file leaves out is filled in. */
  function load(document, offer) {
    if (tape && !tape.recorded) {
      live();
      own = tape;
    }
    pause();
    const { head, charts, ended, about, made } = document;
    let cache = null;
    const shown = document.snapshots.map((one) => ({ ...one, cache: (cache = one.cache ?? cache) }));
    // A run of its own each time: plots keep their zoom, and a pause lasts, as long as the run is the same.
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

  /** The run as a file's text: see ui/recordings/recording.py. `more`: about and made. */
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
      slow = on;
      server.halfSpeed(on);
    },
    tape: {
      jump, live, play, pause, load, back, asRecording, elapsed,
      /** What can be shown: {count, now, away, playing, recorded, own, ended, held}. */
      get state() {
        return {
          count: tape?.shown.length ?? 0, now: tape?.now ?? -1, away: Boolean(tape?.away), playing: playing.timer !== null,
          recorded: tape?.recorded ?? null, own: Boolean(own), ended: tape?.ended ?? null, held,
        };
      },
    },
  });

  // Before anything else hears of the click: a race starts, or ends, on a page that shows the newest.
  document.addEventListener("click", (event) => {
    if (!event.target.closest("#run, #stop") || !tape) return;
    if (tape.recorded) pause();
    else if (tape.away) live();
  }, true);
})();
