/* Steps 4 to 6 of "How it works": ragged rows, draft lengths, the roofline. Contract: draw(step) of how_step.js. */
(() => {
  "use strict";
  const { number, formulas: f } = window.Bass;
  const DRAFTS = 7, ROUNDS = 24, MOST_ROUNDS = 400, SEED = 5, LONGEST = 16, MOST_TOKENS = 1024;

  /** One round's cells, a line for each row, and the common stop that would end them all. */
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
    step.say(`This round writes ${own} tokens; with one common stop, ${b * (stop + 1)}. On average: ` +
      `${number(f.tokens(a, DRAFTS), 2)} tokens a row with ends of their own, ${number(f.tokens(a ** b, DRAFTS), 2)} with a common stop.`);
    step.answer(`With chance a^b = ${a}^${b} = ${number(a ** b, 3)}: every row has to accept it. So the round writes ` +
      `${number(f.tokens(a ** b, DRAFTS), 2)} tokens a row in place of ${number(f.tokens(a, DRAFTS), 2)}.`);
  }

  /** What Algorithm 1 drafts, round by round, and below it the speed-up of each fixed length. */
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
      `${number(own, 2)}×. ` + (best ? `By cost, ${best} drafts are best: ${number(gains[best], 2)}×.` : "By cost, plain steps are best: 1.00×."));
    const then = [state];
    for (let i = 0; i < 3; i++) then.push(f.algorithm1(rule, then[i], [0]));
    step.answer(`After the ${MOST_ROUNDS} rounds played here the length is ${state.length}; then ${then.slice(1).map((s) => s.length).join(", ")}. ` +
      (state.shrinking ? "The round before was a fall already, so each of these is a tenth, rounded up, and one more. No length is below 1."
        : "The first fall is a tenth, rounded up; each later one is one faster. No length is below 1."));
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
    picture.text(0, 172, "drafted; below, accepted by the best row", "soft");
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
    picture.text(0, 168, "speed-up by draft length, best one marked", "soft");
  }

  /** Time of a forward over its tokens, both on logarithmic axes. */
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
    step.say(`A plain step of ${b} ${b === 1 ? "row" : "rows"} takes ${number(plain.ms, 2)} ms. Checking ${l} drafts a row, ${n} tokens, takes ` +
      `${number(check.ms, 2)} ms: ${number(check.ms / plain.ms, 2)} plain steps.`);
    step.answer(`From batch ${number(Math.floor(ridge / (l + 1)) + 1, 0)} on: a verification has b × (l + 1) tokens, and multiplying takes ` +
      `longer than reading above the ridge, ${number(ridge, 1)} tokens.`);
  }

  window.Bass.mountLastSteps = (root) => {
    const rows = window.Bass.mountStep(root, "ragged", ragged);
    rows.root.querySelector("[data-draw]").addEventListener("click", () => {
      rows.seed += 1;
      rows.draw();
    });
    window.Bass.mountStep(root, "policies", policies);
    window.Bass.mountStep(root, "roofline", roofline);
  };
})();
