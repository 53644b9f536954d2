/* The prompt, and the line above the bars: one sentence at a time about the race at the playhead (narrate.js).
   - At real speed it shows only the most important ones, at other speeds those for which there is time. In the opening, which
     slows down for them, it shows the first of each kind, and the scenes' own. While the playhead rests, the newest.
   - While the playhead moves, a sentence stands for at least LEAST_MS, so that a screen reader gets at most one a second. It hears the opening's HEARD scenes once. */
import { on, setText } from "bass/page/page.js";
import { tape } from "bass/race/tape.js";
import { EPSILON } from "bass/race/times.js";
import { narrate } from "bass/race/narrate.js";

const LEAST_MS = 1000, RESTS_MS = 150, HEARD = 3;
let predicted = false, line = null, changed = -LEAST_MS, timer = null, opening = false, known = { race: null };

/** All sentences of the race on the tape. They are computed again once it has more rounds. */
export function sentences() {
  const { race, last } = tape, view = last?.done ? last : null;
  const count = race ? [...race.lanes.values()].reduce((sum, { rounds }) => sum + rounds.length, 0) : 0;
  if (known.race !== race || known.count !== count || known.view !== view) known = { race, count, view, all: race ? narrate(race, view) : [] };
  return known.all;
}

/** The sentences to show at this speed: each needs LEAST_MS. */
function timely(all, speed) {
  const chosen = [];
  for (const sentence of all) {
    if (sentence.star || speed < 1 && sentence.ms - (chosen.at(-1)?.ms ?? -Infinity) >= speed * LEAST_MS) chosen.push(sentence);
  }
  return chosen;
}

/** Show a sentence now, or `delay` ms later. */
export function say(text, delay = 0) {
  clearTimeout(timer);
  if (!line || line.textContent === text) return;
  if (delay > 0) timer = setTimeout(() => say(text), delay);
  else {
    setText(line, text);
    changed = performance.now();
  }
}

function follow({ ms, speed, follows, moving }) {
  if (predicted) return;
  const all = sentences(), rests = !moving && !follows;
  const chosen = opening ? all.filter(({ first }) => first) : rests ? all : timely(all, follows ? 1 : speed);
  const now = chosen.findLast((sentence) => sentence.ms <= ms + EPSILON);
  // While somebody drags the playhead, only the place where it rests speaks.
  say(now?.text ?? "", !now ? 0 : moving ? changed + LEAST_MS - performance.now() : rests ? RESTS_MS : 0);
}

export const mountSaid = (root) => {
  let scenes = 0;
  line = root.querySelector(".said");
  on("scene", (scene) => {
    opening = scene !== null;
    scenes += 1;
    // Screen readers have heard the opening once.
    line.ariaLive = opening && scenes > HEARD ? "off" : "polite";
  });
  on("playhead", follow);
  // Of the slider over readers (sweep/readers.js).
  on("readers", (shown) => {
    predicted = Boolean(shown);
    if (shown) say(shown.said);
    else follow({ ...tape.state, moving: false });
  });
  const asked = root.querySelector(".asked");
  on("start", ({ settings }) => {
    const prompt = String(settings.prompt ?? "");
    setText(asked, prompt && `Asked: ${prompt.trim().replace(/\s+/g, " ")}`);
    asked.title = prompt;
  });
};
