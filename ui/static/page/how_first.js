/* Steps 1 to 3 of "How it works": memory, drafting, the rule. Contract: draw(step) of how_step.js for each. */
(() => {
  "use strict";
  const { number, formulas: f } = window.Bass;
  const WORDS = ["the", "a", "my", "one", "his"];
  const DRAWS = 1000;
  // The value that chi-squared with four degrees of freedom stays below in 95 of 100 honest draws.
  const CHI_95 = 9.49;
  const percent = (value, digits = 0) => `${number(value * 100, digits)} %`;

  /** Two bars: reading the weights beside multiplying with them. */
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
      ? `The arithmetic units wait for ${percent(idle, idle > 0.99 ? 1 : 0)} of it: the step is bound by memory.`
      : "Multiplying takes longer than reading: the step is bound by arithmetic."));
    step.answer(`${number(Math.ceil(ridge), 0)} tokens. Reading takes parameters × bytes / bandwidth, multiplying 2 × ` +
      "parameters × tokens / peak; the parameters cancel out, and what is left is peak × bytes / (2 × bandwidth), " +
      `here ${number(ridge, 1)}.`);
  }

  /** A bar for each token of a round: the chance that the round writes it. */
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
    step.say(`The bars add up to ${number(expected, 2)} tokens a round. A round costs ${number(l * c + 1, 2)} steps of the ` +
      `target, so the speed-up is ${number(f.speedup(a, l, c), 2)}×.`);
    const best = Array.from({ length: 17 }, (_, i) => i).reduce((x, y) => (f.speedup(a, y, c) > f.speedup(a, x, c) + 1e-12 ? y : x));
    step.answer(best === 0
      ? `None: a = ${a} is not above c = ${c}. A first draft adds a tokens to a round and c steps to its cost.`
      : `${best} drafts, with ${number(f.speedup(a, best, c), 2)}×. Any drafting pays only where a is above c, here ${a} above ${c}.`);
  }

  /** p, and the 1,000 tokens that the rule wrote. */
  function rule(step) {
    const { values, picture } = step;
    const p = f.scaled(WORDS.map((_, i) => values[`p${i}`])), q = f.scaled(WORDS.map((_, i) => values[`q${i}`]));
    const { accepted, recovered } = f.histogram(p, q, DRAWS, step.seed);
    const total = accepted.map((count, i) => count + recovered[i]), stands = f.sum(p.map((value, i) => Math.min(value, q[i])));
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
      `χ² = ${number(chi, 1)} with 4 degrees of freedom; honest draws from p stay below ${CHI_95} in 95 of 100 series.`);
    step.answer(`The sum of min(p, q) over the tokens: ${percent(stands, 1)}. It is all of them where q equals p, ` +
      "and none where no token has both.");
  }

  function mountRule(root) {
    const step = window.Bass.mountStep(root, "rule", (own) => {
      own.seed ??= 1;
      rule(own);
    });
    step.root.querySelector("[data-draw]").addEventListener("click", () => {
      step.seed += 1;
      step.draw();
    });
  }

  window.Bass.mountFirstSteps = (root) => {
    window.Bass.mountStep(root, "memory", memory);
    window.Bass.mountStep(root, "drafting", drafting);
    mountRule(root);
  };
})();
