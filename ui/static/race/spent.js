/* Where the time of a lane's rounds went, for scripts that draw it. Contract: a round ends at its `ms` and begins where
   the round before it ended; inside it stand draft_ms, then verify_ms, and the host's rest. Draws nothing. */
(() => {
  "use strict";
  const { number, wear } = window.Bass;
  // A round narrower than this many pixels is drawn together with its neighbours.
  const LEAST = 2;
  const laid = new WeakMap();

  /** A lane's rounds as {round, kind, begin, end, draft, target}; the parts are null where they are not known. */
  function roundsOf(lane) {
    if (!laid.has(lane)) laid.set(lane, { rounds: [], sums: { draft: 0, verify: 0, plain: 0, host: 0 } });
    const { rounds, sums } = laid.get(lane);
    for (const round of lane.rounds.slice(rounds.length)) {
      const begin = rounds.at(-1)?.end ?? 0, { kind, ms: end, draft_ms: draft, verify_ms: target } = round;
      rounds.push({ round, kind, begin, end, draft, target });
      if (draft === null) continue;
      sums.draft += draft;
      sums[kind] += target;
      sums.host += Math.max(0, end - begin - draft - target);
    }
    return laid.get(lane);
  }

  /** Rounds too narrow to be seen, joined: their parts stand side by side, as in one round. */
  function joined(rounds, pixels) {
    const made = [];
    for (const one of rounds) {
      const last = made.at(-1), same = last && last.kind !== "prefill" && one.kind !== "prefill";
      if (same && (last.end - last.begin) * pixels < LEAST) {
        const both = (a, b) => (a === null || b === null ? null : a + b);
        made[made.length - 1] = { ...last, kind: one.kind === "plain" ? last.kind : one.kind, end: one.end,
          draft: both(last.draft, one.draft), target: both(last.target, one.target), many: true };
      } else made.push(one);
    }
    return made;
  }

  /** The parts of a round as [track, kind, begin, end], in ms. */
  function partsOf({ kind, begin, end, draft, target }) {
    if (kind === "prefill") return [["target", "prefill", begin, end]];
    if (draft === null) return [["target", "unsplit", begin, end]];
    const drafted = Math.min(end, begin + draft), verified = Math.min(end, drafted + target);
    return [["draft", "draft", begin, drafted], ["target", kind, drafted, verified], ["host", "host", verified, end]]
      .filter(([, , from, to]) => to > from);
  }

  /** Index of the first round that ends after `ms`. */
  function firstAfter(rounds, ms) {
    let low = 0, high = rounds.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (rounds[middle].end > ms) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  /** One round in words. */
  function describe({ round, kind, begin, end, draft, target }) {
    const ms = (value) => number(value, 1), wrote = `${round.written} ${round.written === 1 ? "token" : "tokens"}`;
    if (kind === "prefill") return `${wear("Reading the prompt")}: ${ms(end - begin)} ms`;
    const head = `${wear(`Round ${round.round}`)}: ${ms(end - begin)} ms`;
    if (draft === null) return `${head}, ${wrote}`;
    const host = `host ${ms(Math.max(0, end - begin - draft - target))}`;
    const own = kind === "plain" ? `plain step ${ms(target)}` : `verification ${ms(target)}`;
    return `${head} = ${draft ? `drafts ${ms(draft)} + ` : ""}${own} + ${host}; ${wrote}`;
  }

  window.Bass.spent = { roundsOf, joined, partsOf, firstAfter, describe };
})();
