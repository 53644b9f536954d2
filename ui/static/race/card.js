/* A card to share: one picture of a race, drawn in the browser. card() resolves to a PNG with the verdict, each lane's
   rounds over its time, the machine, the date and the revision. A block is as wide as its round took, without the prompt,
   and as high as the tokens it wrote. */
import { number, bisect } from "bass/page/page.js";
import { run, laneName, lookOf, writtenIn } from "bass/race/run.js";
import { wear } from "bass/race/predicted.js";
import { plots } from "bass/page/plots.js";
import { origin } from "bass/race/save.js";

const WIDTH = 1200, HEIGHT = 630, EDGE = 48;
// The lanes: left edge and width of the blocks, top of the first lane, distance and height.
const LEFT = 240, SPAN = 780, TOP = 206, APART = 108, HIGH = 76;

/** The settings of a race in one line. Recordings may lack some. */
function settingsOf({ settings, batch_size: rows }) {
  const { temperature, draft_length: length, max_new_tokens: tokens, seed, prompt } = settings;
  const known = (value, words) => (value === null || value === undefined ? "" : words);
  const parts = [`${rows} ${rows === 1 ? "row" : "rows"}`, known(temperature, `temperature ${temperature}`), known(length, `draft length ${length}`),
    known(tokens, `up to ${tokens} tokens`), known(seed, `seed ${seed}`)];
  return `${parts.filter(Boolean).join(", ")}${prompt ? `. Prompt: ${prompt}` : ""}`;
}

/** A lane's rounds as [{at, ms, tokens}], without the prompt, and the time of all. */
function blocksOf({ rounds }) {
  let at = 0, before = 0;
  const blocks = rounds.flatMap((round) => {
    const ms = round.time_ms - before;
    before = round.time_ms;
    if (round.kind === "prefill") return [];
    at += ms;
    return [{ at: at - ms, ms, tokens: writtenIn(round) }];
  });
  return { blocks, end: at };
}

/** The longest beginning of a text that is at most `width` wide, and at least one character. */
function beginning(context, text, width) {
  const characters = [...text], first = (count) => characters.slice(0, count).join("");
  return first(Math.max(1, bisect(characters.length, (i) => context.measureText(first(i + 1)).width <= width)));
}

/** The text cut to lines of at most `width`, between words if possible. The last line ends with "…" if text is left. */
function wrapped(context, text, width, count) {
  const lines = [];
  let left = text.trim().replace(/\s+/g, " ");
  while (left && lines.length < count) {
    let line = beginning(context, left, width);
    if (line !== left && left[line.length] !== " " && line.includes(" ")) line = line.slice(0, line.lastIndexOf(" "));
    left = left.slice(line.length).trim();
    lines.push(line);
  }
  if (left) lines.push(`${beginning(context, lines.pop(), width - context.measureText(" …").width)} …`);
  return lines;
}

function drawLane(context, colour, { name, blocks, end }, y, scale, tallest) {
  const { ms_per_token: ms, speedup } = run().view?.lanes[name]?.metrics ?? {};
  context.fillStyle = colour(lookOf(name).colour);
  context.font = `700 28px ${colour.font}`;
  context.fillText(laneName(name), EDGE, y + HIGH - 30, LEFT - EDGE - 16);
  for (const block of blocks) {
    const height = (HIGH * block.tokens) / tallest;
    context.fillRect(LEFT + block.at * scale, y + HIGH - height, Math.max(0.5, block.ms * scale - 1.5), height);
  }
  context.fillText(number(speedup ?? null, 2, "×"), LEFT + end * scale + 14, y + HIGH - 4, WIDTH - EDGE - LEFT - end * scale - 14);
  context.fillStyle = colour("soft");
  context.font = `20px ${colour.font}`;
  context.fillText(`${number(ms ?? null, 1)} ms per token`, EDGE, y + HIGH - 2, LEFT - EDGE - 16);
  context.fillRect(LEFT, y + HIGH, SPAN + 100, 1);
}

function draw(context) {
  const colour = plots.palette(document.body), { head, lanes, view } = run(), { about, made } = origin();
  const text = (size, weight, tone, words, y, count) => {
    Object.assign(context, { font: `${weight} ${size}px ${colour.font}`, fillStyle: colour(tone) });
    wrapped(context, words, WIDTH - 2 * EDGE, count).forEach((line, i) => context.fillText(line, EDGE, y + i * size * 1.2));
  };
  context.fillStyle = colour("card");
  context.fillRect(0, 0, WIDTH, HEIGHT);
  text(40, 700, "ink", view?.verdict.head ?? "A race of decoders", 74, 2);
  text(22, 400, "soft", wear(settingsOf(head)), 150, 2);
  // At most three lanes fit.
  const drawn = [...lanes.values()].slice(-3).map((lane) => ({ name: lane.name, ...blocksOf(lane) }));
  const longest = Math.max(...drawn.map(({ end }) => end), 1e-6);
  const tallest = Math.max(1, ...drawn.flatMap(({ blocks }) => blocks.map(({ tokens }) => tokens)));
  drawn.forEach((lane, i) => drawLane(context, colour, lane, TOP + i * APART, SPAN / longest, tallest));
  text(20, 400, "soft", about, 568, 1);
  const version = [made.version, made.revision].filter(Boolean).join(", ");
  text(20, 400, "soft", ["Blocks are steps: width is time, height is tokens", about.includes(made.date) ? "" : made.date, version && `revision ${version}`].filter(Boolean).join(" · "), 600, 1);
}

export const card = () => {
  const canvas = Object.assign(document.createElement("canvas"), { width: WIDTH, height: HEIGHT });
  draw(canvas.getContext("2d"));
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
};
