/* Checks a recording before it is played: damaged(document) names the part that could not be drawn, or is "". The
   rules are those of ui/recordings/recording.py, because a saved page has no server that could check. A test damages
   recordings in many ways and expects both to refuse them. */
const ORIGINS = ["s", "a", "r", "b", "+"], KINDS = ["prefill", "plain", "verify"], NUMBERS = ["p", "q", "u", "chance"];
const ENDS = ["done", "stopped", "error"];
const MAX_ROWS = 4096;

function need(...conditions) {
  if (!conditions.every(Boolean)) throw new TypeError("does not fit");
}

function items(value) {
  need(Array.isArray(value));
  return value;
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isNumber = (...values) => values.every(Number.isFinite);
const isWhole = (...values) => values.every((value) => Number.isInteger(value) && value >= 0);
const isText = (...values) => values.every((value) => typeof value === "string");
const numbersOrNull = (values) => items(values).every((value) => value === null || isNumber(value));
const entries = (value) => {
  need(isObject(value));
  return Object.entries(value);
};

function head({ head: { run, lanes, settings, batch_size: rows } }) {
  need(isText(run, ...items(lanes)), isObject(settings), lanes.length, isWhole(rows), rows <= MAX_ROWS);
  // Lanes are keys of objects, and parts of selectors.
  need(lanes.every((name) => name !== "__proto__" && !/["\\]/.test(name)));
}

function snapshots({ head: { lanes, batch_size: rows }, snapshots: shots }) {
  const written = new Map(lanes.map((name) => [name, Array(rows).fill(0)]));
  need(items(shots).length);
  for (const { lines, view } of shots) {
    for (const line of items(lines)) {
      for (const [name, update] of entries(line)) {
        need(written.has(name));
        lane(update, written.get(name));
      }
    }
    views(view, lanes, rows);
  }
}

/** Check one lane's part of a line, and add its tokens to `written`. */
function lane(update, written) {
  for (const [index, tokens] of entries(update.new)) {
    need(/^\d+$/.test(index), Number(index) < written.length);
    for (const [origin, text, ms, token] of items(tokens)) {
      need(ORIGINS.includes(origin), isText(text), isNumber(ms), Number.isInteger(token));
      // "+" adds to the previous token.
      need(origin !== "+" || written[index]);
      written[index] += origin !== "+";
    }
  }
  need(isNumber(update.clock_ms));
  for (const round of items(update.rounds)) {
    const { rows, lengths, kind } = round;
    need(KINDS.includes(kind), isWhole(round.round, round.draft_length, ...items(lengths)), isNumber(round.time_ms));
    need(numbersOrNull([round.draft_ms, round.verify_ms]));
    need(kind === "prefill" || !lengths.length || lengths.length === items(rows).length);
    for (const entry of items(rows)) row(written, entry);
  }
}

/** Check one row of a round. It must refer to written tokens, and drafts only to earlier drafts. */
function row(written, { sequence, start, written: count, accepted, one_by_one: oneByOne, drafted, ...more }) {
  const drafts = items(drafted).length, { drafted_text: texts, next_p: next, parents, path, detail } = more;
  need(isWhole(sequence, start, count, accepted, oneByOne, ...drafted));
  need([undefined, true, false].includes(more.certain));
  need(accepted <= drafts, start + count <= written[sequence]);
  need(texts === null || (items(texts).length === drafts && isText(...texts)), numbersOrNull([next]));
  need(...NUMBERS.map((name) => items(more[name]).length === drafts && numbersOrNull(more[name])));
  if (parents !== null) {
    need(items(parents).length === drafts, parents.every((at, i) => Number.isInteger(at) && at >= -1 && at < i));
  }
  if (path !== null) need(isWhole(...items(path)), path.every((at) => at < drafts));
  if (detail !== null) details(detail, drafts);
}

function details({ rule, sources, own_p: p, own_q: q, ending }, drafts) {
  need(isText(rule, ...items(sources)), sources.length === drafts);
  need([p, q].every((column) => column === null || numbersOrNull(column)));
  if (ending === null) return;
  need(isWhole(ending.after), ending.draft === null || isWhole(ending.draft));
  need(numbersOrNull([ending.mass]), isNumber(ending.reach));
  for (const token of items(ending.top)) {
    need(isWhole(token.token), token.text === null || isText(token.text), isNumber(token.p));
    need(numbersOrNull([token.q, token.residual]));
  }
}

function views({ lanes, verdict, done, elapsed_ms: elapsed, device, comparison }, names, rows) {
  need(typeof done === "boolean", isNumber(elapsed), isObject(device));
  need(verdict.head === null || isText(verdict.head), isText(...entries(verdict.lanes).map(([, words]) => words)));
  for (const [name, { error, finish_reasons: reasons, metrics, clock_ms: clock }] of entries(lanes)) {
    need(names.includes(name), [error, ...items(reasons)].every((text) => text === null || isText(text)));
    need(reasons.length <= rows, isObject(metrics), isNumber(clock));
  }
  for (const [, differences] of entries(comparison ?? {})) {
    need(items(differences).length <= rows, differences.every((row) => row === null || isWhole(row.at)));
  }
}

function charts({ charts: { series, lanes, rounds, device }, ended }) {
  const groups = [series, ...entries(lanes).map(([, group]) => group), ...entries(rounds).map(([, group]) => group)];
  need(groups.every((columns) => entries(columns).every(([, column]) => numbersOrNull(column))));
  need(isObject(device), ENDS.includes(ended));
}

const PARTS = { "its head": head, "its snapshots": snapshots, "its charts or its end": charts };

export const damaged = (document) => {
  for (const [part, check] of Object.entries(PARTS)) {
    try {
      check(document);
    } catch {
      return part;
    }
  }
  return "";
};
