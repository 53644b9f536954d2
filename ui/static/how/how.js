/* "How it works". Each step has a function that draws its `picture` and sets its sentences. The function runs once at
   the start and at every change of the sliders, the lists or the width. The what-if plot shows the expected speed-up by
   token acceptance (Leviathan et al. 2211.17192) and the measured points of the last run. A round of length l writes
   (1 - a^(l+1)) / (1 - a) tokens, and the speed-up is that divided by l c + 1. With a common stop for a batch of b,
   a^b replaces a. */
import * as f from "bass/how/formulas.js";
import { on, number, percent, setText, svg } from "bass/page/page.js";
import { run, laneName } from "bass/race/run.js";
import { clock } from "bass/race/predicted.js";
import { plots } from "bass/page/plots.js";

/** One picture, in CSS pixels, as wide as its box. */
class Picture {
  constructor(box) {
    this.box = box;
    this.svg = svg("svg", { role: "img" });
    box.append(this.svg);
  }

  get width() {
    return Math.max(260, Math.min(this.box.clientWidth || 480, 640));
  }

  /** Start a new picture. Screen readers read the title. */
  clear(height, title) {
    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.svg.setAttribute("aria-label", title);
    this.svg.style.maxWidth = `${this.width}px`;
  }

  rect(x, y, width, height, kind, about = "") {
    const box = svg("rect", { x, y, width: Math.max(0, width), height: Math.max(0, height), rx: 2, class: kind });
    if (about) box.append(svg("title", {}, about));
    this.svg.append(box);
  }

  text(x, y, words, kind = "", anchor = "start") {
    this.svg.append(svg("text", { x, y, class: kind, "text-anchor": anchor }, words));
  }

  line(points, kind) {
    this.svg.append(svg("path", { d: "M" + points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L"), class: kind }));
  }

  dot(x, y, kind) {
    this.svg.append(svg("circle", { cx: x, cy: y, r: 6, class: kind }));
  }
}

class Step {
  constructor(root, name, draw) {
    this.root = root.querySelector(`[data-step-name=${name}]`);
    this.inputs = [...this.root.querySelectorAll(".walk-controls :is([data-slider], select)")];
    this.pictures = [...this.root.querySelectorAll(".walk-play .picture")].map((box) => new Picture(box));
    this.draw = () => {
      this.label();
      draw(this);
    };
    for (const input of this.inputs) input.addEventListener("input", this.draw);
    let width = 0;
    new ResizeObserver(() => {
      if (!this.pictures.length || this.pictures[0].width === width) return;
      width = this.pictures[0].width;
      this.draw();
    }).observe(this.root);
    this.draw();
  }

  get picture() {
    return this.pictures[0];
  }

  /** The value of each slider, and the data of each list's selected option, as numbers. */
  get values() {
    return Object.assign({}, ...this.inputs.map((input) => {
      if (input.tagName !== "SELECT") return { [input.dataset.slider]: Number(input.value) };
      return Object.fromEntries(Object.entries(input.selectedOptions[0].dataset).map(([key, value]) => [key, Number(value)]));
    }));
  }

  label() {
    for (const input of this.inputs) {
      const output = input.closest("label").querySelector("output");
      if (output) setText(output, input.value);
    }
  }

  say(words) {
    setText(this.root.querySelector(".walk-said"), words);
  }

  answer(words) {
    setText(this.root.querySelector(".exercise-answer"), words);
  }
}

const WORDS = ["the", "a", "my", "one", "his"];
const DRAWS = 1000;
// The 95 % quantile of chi-squared with four degrees of freedom.
const CHI_95 = 9.49;

/** Two bars: the time to read the weights, and the time to multiply with them. */
function memory(step) {
  const { b, ...machine } = step.values, { picture } = step;
  const { reading, multiplying, ms } = f.forward(machine, b), ridge = f.ridge(machine);
  picture.clear(112, `Reading the weights takes ${number(reading, 2)} ms, multiplying ${number(multiplying, 2)} ms`);
  [["reading the weights", reading, "is-target"], ["multiplying", multiplying, "is-arithmetic"]].forEach(([name, time, kind], i) => {
    picture.text(0, 16 + 52 * i, `${name}: ${number(time, 2)} ms`);
    picture.rect(0, 24 + 52 * i, Math.max(2, (time / ms) * (picture.width - 4)), 22, kind);
  });
  const idle = 1 - multiplying / ms;
  step.say(`A step takes ${number(ms, 2)} ms and writes ${b} ${b === 1 ? "token" : "tokens"}. ` + (idle > 0
    ? `The arithmetic units wait for ${percent(idle, idle > 0.99 ? 1 : 0)} of that time: the step is bound by memory.`
    : "Multiplying takes longer than reading: the step is bound by arithmetic."));
  step.answer(`${number(Math.ceil(ridge), 0)} tokens. Reading takes parameters × bytes / bandwidth, multiplying 2 × ` +
    "parameters × tokens / peak. The parameters cancel out, which leaves peak × bytes / (2 × bandwidth), " +
    `here ${number(ridge, 1)}.`);
}

/** A bar for each token of a round, as high as the chance that the round writes it. */
function drafting(step) {
  const { a, c, l } = step.values, { picture } = step, base = 140, wide = picture.width / (l + 1);
  const expected = f.tokens(a, l);
  picture.clear(186, `Chances that a round writes its first, second and further tokens, ${number(expected, 2)} tokens in all`);
  for (let i = 0; i <= l; i++) {
    const height = 116 * a ** i, x = wide * i;
    picture.rect(x + 1, base - height, wide - 3, height, "is-target", `token ${i + 1}: ${percent(a ** i)}`);
    if (wide > 30) picture.text(x + wide / 2, base - height - 5, percent(a ** i), "small", "middle");
    if (wide > 14 || i % 2 === 0) picture.text(x + wide / 2, base + 16, `${i + 1}`, "small", "middle");
  }
  picture.text(0, 178, "chance that a round writes its i-th token", "soft");
  step.say(`The bars add up to ${number(expected, 2)} tokens per round. A round costs ${number(l * c + 1, 2)} steps of the ` +
    `target, so the speed-up is ${number(f.speedup(a, l, c), 2)}×.`);
  const best = Array.from({ length: 17 }, (_, i) => i).reduce((x, y) => (f.speedup(a, y, c) > f.speedup(a, x, c) + 1e-12 ? y : x));
  step.answer(best === 0
    ? `Zero: a = ${a} is not above c = ${c}. The first draft adds ${a} tokens to a round, and ${c} steps to its cost.`
    : `${best} drafts, with ${number(f.speedup(a, best, c), 2)}×. Drafting pays off only if a is above c, here ${a} > ${c}.`);
}

/** p, and the histogram of 1,000 tokens that the rule wrote. */
function rule(step) {
  const { values, picture } = step;
  const p = f.scaled(WORDS.map((_, i) => values[`p${i}`])), q = f.scaled(WORDS.map((_, i) => values[`q${i}`]));
  const { accepted, recovered } = f.histogram(p, q, DRAWS, step.seed ??= 1);
  const total = accepted.map((count, i) => count + recovered[i]), overlap = f.sum(p.map((value, i) => Math.min(value, q[i])));
  Object.assign(step.root.dataset, { p: JSON.stringify(p), q: JSON.stringify(q), counts: JSON.stringify(total) });
  const base = 186, wide = picture.width / WORDS.length, bar = wide * 0.62, scale = 160 / Math.max(...p, ...q, ...total.map((n) => n / DRAWS));
  picture.clear(232, `Of 1,000 draws: ${WORDS.map((word, i) => `${word} ${total[i]}, expected ${number(p[i] * DRAWS, 0)}`).join("; ")}`);
  WORDS.forEach((word, i) => {
    const x = wide * i + wide * 0.1, good = (scale * accepted[i]) / DRAWS, more = (scale * recovered[i]) / DRAWS;
    picture.rect(x, base - good, bar, good, "is-accepted", `${accepted[i]} accepted drafts`);
    if (recovered[i]) picture.rect(x, base - good - more, bar, more, "is-recovered", `${recovered[i]} recovered`);
    picture.line([[x - 5, base - scale * p[i]], [x + bar + 5, base - scale * p[i]]], "line-target");
    picture.rect(x + bar + 5, base - scale * q[i], wide * 0.1, scale * q[i], "is-draft", `q: ${percent(q[i], 1)}`);
    picture.text(x + bar / 2, base + 17, `“${word}”`, "", "middle");
    picture.text(x + bar / 2, base + 34, `${total[i]}`, "small strong", "middle");
  });
  const chi = f.sum(p.map((value, i) => (value > 0 ? (total[i] - DRAWS * value) ** 2 / (DRAWS * value) : 0)));
  step.say(`1,000 draws, series ${step.seed}: ${f.sum(accepted)} accepted drafts, ${f.sum(recovered)} recovered tokens. ` +
    (p.every((value) => value > 0)
      ? `χ² = ${number(chi, 1)} with 4 degrees of freedom. Draws from p itself stay below ${CHI_95} in 95 of 100 series.`
      : "χ² needs every p above 0."));
  step.answer(`The sum of min(p, q) over the tokens: ${percent(overlap, 1)}. It is 100 % if q equals p, ` +
    "and 0 % if no token is possible under both.");
}

const DRAFTS = 7, ROUNDS = 24, MOST_ROUNDS = 400, SEED = 5, LONGEST = 16, MOST_TOKENS = 1024;

/** The cells of one round, one line per row, and a line at the common stop, where all rows would end. */
function ragged(step) {
  const { a, b } = step.values, { picture } = step, next = f.random(step.seed ??= SEED);
  const rows = Array.from({ length: b }, () => f.run(a, DRAFTS, next)), stop = Math.min(...rows);
  const left = 46, size = Math.min(34, (picture.width - left - 2) / (DRAFTS + 1)), tall = b > 8 ? 15 : 24;
  picture.clear(34 + b * tall, `Accepted drafts of ${b} rows: ${rows.join(", ")}; with one common stop ${stop} for each`);
  rows.forEach((count, r) => {
    const y = 22 + r * tall;
    picture.text(0, y + tall / 2 + 3, `row ${r + 1}`, "small soft");
    for (let i = 0; i <= DRAFTS; i++) {
      const own = i === count, kind = i < count ? "accepted" : own ? (count === DRAFTS ? "bonus" : "recovered") : "rejected";
      if (i === DRAFTS && !own) continue;
      picture.rect(left + i * size, y, size - 3, tall - 3, `is-${kind}`, kind);
      const letter = { accepted: "A", recovered: "R", bonus: "B", rejected: "×" }[kind];
      picture.text(left + i * size + (size - 3) / 2, y + tall / 2 + 2.5, letter, `small strong ${kind === "accepted" ? "on-dark" : ""}`, "middle");
    }
  });
  const x = left + (stop + 1) * size - 1.5;
  picture.line([[x, 16], [x, 24 + b * tall]], "line-common");
  picture.text(Math.min(x, picture.width - 100), 11, "one common stop", "small");
  const own = f.sum(rows) + b;
  step.say(`This round writes ${own} tokens, or ${b * (stop + 1)} with one common stop. On average, a row writes ` +
    `${number(f.tokens(a, DRAFTS), 2)} tokens with its own end and ${number(f.tokens(a ** b, DRAFTS), 2)} with a common stop.`);
  step.answer(`With chance a^b = ${a}^${b} = ${number(a ** b, 3)}, because every row has to accept it. So the round writes ` +
    `${number(f.tokens(a ** b, DRAFTS), 2)} tokens per row instead of ${number(f.tokens(a, DRAFTS), 2)}.`);
}

/** The draft lengths of Algorithm 1, round by round, and below them the speed-up of each fixed length. */
function policies(step) {
  const { a, b, c, free } = step.values, [start, increment, modulus, limit] = step.root.dataset.rule.split(" ").map(Number);
  const rule = { start, increment, modulus, limit };
  const { rounds, state } = f.played(rule, a, b, MOST_ROUNDS, SEED), first = rounds.slice(0, ROUNDS);
  Object.assign(step.root.dataset, { lengths: JSON.stringify(rounds.map((r) => r.length)), accepted: JSON.stringify(rounds.map((r) => r.accepted)) });
  lengths(step.pictures[0], first);
  const gain = (l) => f.tokens(a, l) / f.roundCost(l, c, b, free);
  const gains = Array.from({ length: LONGEST + 1 }, (_, l) => gain(l)), best = gains.indexOf(Math.max(...gains));
  const written = f.sum(rounds.map((r) => f.sum(r.accepted) / b + 1));
  const own = written / f.sum(rounds.map((r) => f.roundCost(r.length, c, b, free)));
  speedups(step.pictures[1], gains, best, own);
  step.say(`Algorithm 1 drafts ${number(f.sum(rounds.map((r) => r.length)) / rounds.length, 1)} tokens on average and reaches ` +
    `${number(own, 2)}×. ` + (best ? `The best fixed length at these costs is ${best}: ${number(gains[best], 2)}×.` : "At these costs, plain steps are best: 1.00×."));
  const then = [state];
  for (let i = 0; i < 3; i++) then.push(f.algorithm1(rule, then[i], [0]));
  step.answer(`After the ${MOST_ROUNDS} rounds played here, the next length is ${state.length}; then come ${then.slice(1).map((s) => s.length).join(", ")}. ` +
    (state.shrinking ? "The round before already shrank the length, so each of these falls is a tenth, rounded up, plus one. No length is below 1."
      : "The first fall is a tenth, rounded up. Each later one is larger by one. No length is below 1."));
}

function lengths(picture, rounds) {
  const count = picture.width < 420 ? 14 : ROUNDS, wide = picture.width / count, base = 140;
  const shown = rounds.slice(0, count), scale = 116 / Math.max(...shown.map((r) => r.length));
  picture.clear(178, `Draft lengths by Algorithm 1: ${shown.map((r) => r.length).join(", ")}`);
  shown.forEach(({ length, accepted }, i) => {
    const most = Math.max(...accepted);
    picture.rect(wide * i + 1, base - scale * length, wide - 3, scale * length, "is-rejected", `round ${i + 1}: ${length} drafted`);
    picture.rect(wide * i + 1, base - scale * most, wide - 3, scale * most, "is-accepted", `best row: ${most} accepted`);
    picture.text(wide * (i + 0.5), base - scale * length - 5, `${length}`, "small strong", "middle");
    picture.text(wide * (i + 0.5), base + 15, `${most}`, "small", "middle");
  });
  picture.text(0, 172, "above: drafted; below: accepted by the best row", "soft");
}

function speedups(picture, gains, best, own) {
  const top = Math.max(...gains, own, 1.1), base = 134, wide = (picture.width - 34) / gains.length;
  const y = (value) => base - (112 * value) / top;
  picture.clear(174, `Speed-up by draft length: ${gains.map((gain, l) => `${l}: ${number(gain, 2)}`).join(", ")}; Algorithm 1: ${number(own, 2)}`);
  gains.forEach((gain, l) => {
    picture.rect(34 + wide * l, y(gain), wide - 3, base - y(gain), l === best ? "is-target" : "is-kept", `${l} drafts: ${number(gain, 2)}×`);
    if (wide > 18 || l % 2 === 0) picture.text(34 + wide * (l + 0.5), base + 15, `${l}`, `small ${l === best ? "strong" : ""}`, "middle");
  });
  picture.line([[34, y(1)], [picture.width, y(1)]], "line-target");
  picture.text(0, y(1) + 4, "1×", "small");
  picture.line([[34, y(own)], [picture.width, y(own)]], "line-own");
  picture.text(picture.width, y(own) - 5, "Algorithm 1", "small strong", "end");
  picture.text(0, 168, "speed-up by draft length, the best one marked", "soft");
}

/** The time of a forward by its tokens, on logarithmic axes. */
function roofline(step) {
  const { b, l, ...machine } = step.values, { picture } = step, n = b * (l + 1), ridge = f.ridge(machine);
  const plain = f.forward(machine, b), check = f.forward(machine, n), most = Math.max(MOST_TOKENS, n);
  const low = plain.reading * 0.7, high = f.forward(machine, most).ms * 1.3, left = 48, base = 210;
  const x = (tokens) => left + ((picture.width - left - 12) * Math.log(tokens)) / Math.log(most);
  const y = (ms) => base - (190 * Math.log(ms / low)) / Math.log(high / low);
  picture.clear(256, `A plain step takes ${number(plain.ms, 2)} ms, a verification ${number(check.ms, 2)} ms; the ridge is at ${number(ridge, 0)} tokens`);
  picture.line([[left, 12], [left, base], [picture.width, base]], "line-axis");
  const bend = Math.min(ridge, most);
  picture.line([[x(1), y(f.forward(machine, 1).ms)], [x(bend), y(f.forward(machine, bend).ms)], [x(most), y(f.forward(machine, most).ms)]], "line-target");
  for (let tick = 1; tick <= most; tick *= 4) picture.text(x(tick), base + 16, `${tick}`, "small soft", "middle");
  picture.text(picture.width, base + 36, "tokens in the forward", "soft", "end");
  picture.text(0, 12, "ms", "soft");
  picture.text(left - 6, y(plain.reading) + 4, number(plain.reading, 1), "small", "end");
  if (high > 2 * plain.reading) picture.text(left - 6, y(f.forward(machine, most).ms) + 4, number(f.forward(machine, most).ms, 1), "small", "end");
  picture.dot(x(b), y(plain.ms), "is-plain");
  picture.dot(x(n), y(check.ms), "is-target");
  picture.text(x(b), y(plain.ms) - 12, "plain", "small strong", x(b) > picture.width - 40 ? "end" : "start");
  picture.text(x(n), y(check.ms) + 22, "verification", "small strong", x(n) > picture.width - 80 ? "end" : "start");
  step.say(`A plain step of ${b} ${b === 1 ? "row" : "rows"} takes ${number(plain.ms, 2)} ms. Verifying ${l} drafts per row, ${n} tokens, takes ` +
    `${number(check.ms, 2)} ms: ${number(check.ms / plain.ms, 2)} plain steps.`);
  step.answer(`From batch ${number(Math.floor(ridge / (l + 1)) + 1, 0)} on: a verification has b × (l + 1) tokens, and above the ridge of ` +
    `${number(ridge, 1)} tokens, multiplying takes longer than reading.`);
}

const POINTS = 101;

class WhatIf {
  constructor(element) {
    this.element = element;
    this.plot = element.querySelector(".what-if .plot");
    this.sliders = [...element.querySelectorAll(".what-if [data-slider]")];
    for (const slider of this.sliders) slider.addEventListener("input", () => this.draw());
    on("phase", () => this.draw());
    plots.onTheme(() => this.draw(), () => {
      this.visible = this.plot.checkVisibility();
      this.draw();
    });
    this.visible = false;
    new IntersectionObserver((entries) => {
      this.visible = entries.some((entry) => entry.isIntersecting);
      if (this.visible) plots.loadFor(this.plot).then(() => this.draw());
    }).observe(this.plot);
  }

  values() {
    return Object.fromEntries(this.sliders.map((slider) => [slider.dataset.slider, Number(slider.value)]));
  }

  /** The measured points, one for each lane that drafted. */
  measured(colour) {
    return Object.entries(run()?.view?.lanes ?? {})
      .filter(([, { metrics: m }]) => Number.isFinite(m.token_acceptance) && Number.isFinite(m.speedup))
      .map(([name, { metrics: m }]) => ({
        type: "scatter", mode: "markers", name: `${laneName(name)}, ${clock() ? "predicted" : "measured"}`, x: [m.token_acceptance], y: [m.speedup],
        marker: { size: 14, color: plots.lineOf(colour, name).color, line: { width: 2, color: colour("card") } },
        hovertemplate: "a %{x:.2f}, %{y:.2f}×<extra>%{fullData.name}</extra>",
      }));
  }

  draw() {
    const { a, c, l, b } = this.values();
    for (const slider of this.sliders) {
      setText(this.element.querySelector(`.what-if [data-output=${slider.dataset.slider}]`), `${Number(slider.value)}`);
    }
    setText(this.element.querySelector(".what-if-line"),
      `Expected at a = ${a}: ${number(f.tokens(a, l), 2)} tokens per round, ${number(f.speedup(a, l, c), 2)}× if each row ` +
      `has its own end, and ${number(f.speedup(a ** b, l, c), 2)}× with one common stop for the batch of ${b}.`);
    if (!this.visible || !window.Plotly) return;
    const colour = plots.palette(this.plot), axis = plots.axis(colour);
    const x = Array.from({ length: POINTS }, (_, i) => i / (POINTS - 1));
    const line = (name, f, look) => ({ type: "scatter", mode: "lines", name, x, y: x.map(f), line: look });
    const own = { color: colour("own-end"), width: 3 }, common = { color: colour("common-stop"), width: 2, dash: "dash" };
    plots.react(this.plot, [
      line("each row with its own end (BASS), expected", (v) => f.speedup(v, l, c), own),
      line(`one common stop, batch ${b}, expected`, (v) => f.speedup(v ** b, l, c), common),
      { type: "scatter", mode: "markers", name: "your a", x: [a], y: [f.speedup(a, l, c)], marker: { size: 9, color: colour("ink"), symbol: "x" } },
      ...this.measured(colour),
    ], plots.layout(colour, "what-if", {
      height: 340, hovermode: "closest", legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11.5 } }, margin: { l: 50, r: 10, t: 60, b: 40 },
      xaxis: { ...axis, range: [0, 1.01], title: { text: "token acceptance a", standoff: 4 } },
      yaxis: { ...axis, ticksuffix: "×", title: { text: "speed-up over regular", standoff: 4 } },
      shapes: [{ type: "line", x0: 0, x1: 1.01, y0: 1, y1: 1, line: { color: colour("soft"), width: 1, dash: "dot" } }],
    }));
  }
}

const STEPS = { memory, drafting, rule, ragged, policies, roofline };

export const mountHow = (element) => {
  const root = element.querySelector(".bass-how");
  for (const [name, draw] of Object.entries(STEPS)) {
    const step = new Step(root, name, draw);
    step.root.querySelector("[data-draw]")?.addEventListener("click", () => {
      step.seed += 1;
      step.draw();
    });
  }
  // Set the hash here: with Gradio's <base>, which drops the query after "?", the link would open another page.
  root.querySelector(".walk-way").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link) return;
    event.preventDefault();
    location.hash = link.hash;
  });
  return new WhatIf(root);
};
