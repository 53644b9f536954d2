/* The formulas of "How it works", each with its source. They are pure functions. Random numbers come from a seeded
   generator, so that a picture can be repeated. */
/** A generator of numbers in [0, 1): mulberry32. */
export function random(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}

export const sum = (values) => values.reduce((total, value) => total + value, 0);
export const scaled = (values) => values.map((value) => value / (sum(values) || 1));

/** Expected tokens of a round with l drafts, each accepted with chance a: Leviathan et al. 2211.17192, equation 1. */
export const tokens = (a, l) => (a >= 1 ? l + 1 : (1 - a ** (l + 1)) / (1 - a));

/** Speed-up if a draft costs c target steps: 2211.17192, theorem 3.8. */
export const speedup = (a, l, c) => tokens(a, l) / (l * c + 1);

/** The first token at which the cumulative chances exceed u. */
function pick(chances, u) {
  let left = u * sum(chances), last = 0;
  for (let i = 0; i < chances.length; i++) {
    if (chances[i] > 0) last = i;
    left -= chances[i];
    if (left < 0 && chances[i] > 0) return i;
  }
  return last;
}

/** One token by the rejection rule: drafted from q or, if rejected, drawn from max(0, p - q). 2211.17192, 2302.01318. */
function drawn(p, q, next) {
  const token = pick(q, next());
  if (next() * q[token] < p[token]) return { token, accepted: true };
  const residual = p.map((value, i) => Math.max(0, value - q[i]));
  return { token: pick(sum(residual) > 0 ? residual : p, next()), accepted: false };
}

/** For each token, how often it was an accepted draft and how often it was recovered. */
export function histogram(p, q, count, seed) {
  const next = random(seed), accepted = p.map(() => 0), recovered = p.map(() => 0);
  for (let i = 0; i < count; i++) {
    const draw = drawn(p, q, next);
    (draw.accepted ? accepted : recovered)[draw.token] += 1;
  }
  return { accepted, recovered };
}

/** The number of accepted drafts, out of l, before the first rejected one. */
export function run(a, l, next) {
  let count = 0;
  while (count < l && next() < a) count += 1;
  return count;
}

/** Algorithm 1 of BASS, 2404.15778, as in bass_core/length/policies.py. rule: {start, increment, modulus, limit}. */
export function algorithm1(rule, { length, shrinking }, accepted) {
  const best = Math.max(...accepted);
  if (best === length) return { length: Math.min(length + rule.increment, rule.limit), shrinking: 0 };
  const fall = Math.ceil(length / rule.modulus) + shrinking;
  return { length: Math.max(1, best, length - fall), shrinking: 1 };
}

/** Rounds of b rows under Algorithm 1: [{length, accepted}], and the state after them. */
export function played(rule, a, b, rounds, seed) {
  const next = random(seed), all = [];
  let state = { length: rule.start, shrinking: 0 };
  for (let i = 0; i < rounds; i++) {
    const accepted = Array.from({ length: b }, () => run(a, state.length, next));
    all.push({ length: state.length, accepted });
    state = algorithm1(rule, state, accepted);
  }
  return { rounds: all, state };
}

/** Time of a forward with n tokens in ms: the larger of reading the weights and multiplying (roofline, Williams et al.
    2009), at two FLOPs per parameter and token. The model has `billions` of parameters of `bytes` bytes each.
    `bandwidth` is in GB/s, `peak` in TFLOP/s. */
export function forward({ billions, bytes, bandwidth, peak }, n) {
  const reading = (billions * bytes / bandwidth) * 1000, multiplying = (2 * billions * n) / peak;
  return { reading, multiplying, ms: Math.max(reading, multiplying) };
}

/** The number of tokens in a forward at which multiplying takes as long as reading. */
export const ridge = ({ bytes, bandwidth, peak }) => (peak * 1000 * bytes) / (2 * bandwidth);

/** The cost of a round with l drafts for b rows, in plain steps of the batch. A step of up to `free` tokens costs as
    much as a step of one. */
export function roundCost(l, c, b, free) {
  const step = (n) => Math.max(1, n / free);
  return l * c + step(b * (l + 1)) / step(b);
}
