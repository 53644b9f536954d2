/* Exports the run as JSON, CSV, a Python snippet and a link, and restores the settings from a link, without the server. */
import { run, stepOf, pathOf, lookOf, comparison } from "bass/race/run.js";

const HASH = "race";

export function asJson() {
  const { head, view, lanes } = run();
  const laneData = [...lanes.values()].map((lane) => [lane.name, {
    ...view?.lanes[lane.name],
    rounds: lane.rounds,
    sequences: lane.sequences.map((sequence, i) => ({
      text: sequence.tokens.map((token) => token.text).join(""),
      token_ids: sequence.tokens.map((token) => token.id),
      pieces: sequence.tokens.map((token) => token.text),
      origins: sequence.tokens.map((token) => token.origin),
      times_ms: sequence.tokens.map((token) => token.ms),
      finish_reason: view?.lanes[lane.name]?.finish_reasons[i] ?? null,
    })),
  }]);
  return JSON.stringify({
    run: 1, settings: head.settings, pair: head.pair, ...(head.clock && { clock: head.clock }), device: view?.device ?? null,
    comparison: comparison(), lanes: Object.fromEntries(laneData),
  }, null, 1);
}

const COLUMNS = [
  "lane", "sequence", "index", "token_id", "text", "origin", "time_ms", "round", "position", "drafted", "p", "q", "u",
  "chance",
];

/** CSV with one line per token. Texts are JSON strings, so that none spans several lines or is read as a formula. */
export function asCsv() {
  const { head, lanes } = run();
  const cell = (value) => (value === null || value === undefined ? "" : `"${String(value).replaceAll('"', '""')}"`);
  const named = (column) => (head.clock && column === "time_ms" ? "predicted_time_ms" : column);
  const lines = [COLUMNS.map(named).join(",")];
  for (const lane of lanes.values()) {
    lane.sequences.forEach((sequence, s) => sequence.tokens.forEach((token, i) => {
      const step = stepOf(sequence, i), at = step ? i - step.start : 0;
      const draft = token.origin === "accepted" ? step.drafts[pathOf(step)[at] ?? at] : null;
      lines.push([
        lane.name, s, i, token.id, cell(JSON.stringify(token.text)), token.origin, token.ms, step?.round ?? "",
        step ? at + 1 : "", step?.drafts.length ?? "", draft ? draft.p : step?.next_p ?? "", draft?.q ?? "",
        draft?.u ?? "", draft?.chance ?? "",
      ].join(","));
    }));
  }
  return `${lines.join("\n")}\n`;
}

/** A string as a Python literal in ASCII: JSON's escapes, with all other characters escaped as well. */
function py(text) {
  return JSON.stringify(text).replace(/[\u007f-\uffff]/g,
    (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`)
    .replace(/\\ud([89ab][0-9a-f]{2})\\ud([c-f][0-9a-f]{2})/g, (_, high, low) => {
      const point = 0x10000 + ((parseInt(`d${high}`, 16) - 0xd800) << 10) + (parseInt(`d${low}`, 16) - 0xdc00);
      return `\\U${point.toString(16).padStart(8, "0")}`;
    });
}

/** A round's entry for RecordedLengths: its draft length, or a list with one per row if they differ. */
const entry = ({ draft_length: length, lengths }) => (lengths.every((own) => own === length) ? `${length}` : `[${lengths.join(", ")}]`);

/** A Python list of these expressions. Equal neighbours are joined, for example "[7] * 3 + [[2, 0]]". */
function pyList(values) {
  const parts = [];
  for (const value of values) {
    if (parts.at(-1)?.value === value) parts.at(-1).count += 1;
    else parts.push({ value, count: 1 });
  }
  return parts.map(({ value, count }) => (count > 1 ? `[${value}] * ${count}` : `[${value}]`)).join(" + ");
}

/** A lane's draft lengths as {all}, one list that applies to all rows, or {rows}, one list per sequence. */
function lengthsOf(lane) {
  const rounds = lane.rounds.filter((round) => round.kind !== "prefill");
  const { lengths } = lookOf(lane.name);
  if (lengths !== "row") return { all: lengths === "batch" ? rounds.map(entry) : [] };
  const rows = lane.sequences.map(({ steps }) => {
    const numbers = new Set(steps.map((step) => step.round));
    return rounds.filter((round) => numbers.has(round.round)).map(entry);
  });
  return { rows };
}

/** A value as a Python literal. */
function literal(value) {
  if (typeof value === "string") return py(value);
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  return typeof value === "boolean" ? (value ? "True" : "False") : `${value}`;
}

// Keywords of `race` that the snippet handles separately, or that `generate` lacks.
const APART = new Set(["prompt", "n", "draft_length", "scheduling", "lanes", "time_budget_ms"]);
const SAMPLING = "sampling.";

/** Keyword arguments of `generate`, one per line, without those in `apart`. Those of SamplingParams share a line. */
function argumentLines({ settings, keywords }, apart = APART) {
  const present = Object.entries(keywords).filter(([name, keyword]) =>
    keyword && !apart.has(keyword) && settings[name] !== null && settings[name] !== undefined);
  const words = (pairs) => pairs.map(([name, keyword]) =>
    `${keyword.replace(SAMPLING, "")}=${literal(settings[name])}`);
  const sampling = words(present.filter(([, keyword]) => keyword.startsWith(SAMPLING)));
  const others = words(present.filter(([, keyword]) => !keyword.startsWith(SAMPLING)));
  return [...others, `sampling=SamplingParams(${sampling.join(", ")})`].map((line) => `    ${line},`);
}

function loadLine({ pair }) {
  const load = Object.entries(pair).filter(([name, value]) => name !== "pair" && value)
    .map(([name, value]) => `, ${name}=${py(value)}`).join("");
  return `pair = load_pair(${py(pair.pair ?? "smollm2")}${load})`;
}

function promptLine({ prompt, prompts }) {
  const rows = prompt.split("\n").map((line) => line.trim()).filter(Boolean).map(py);
  return `prompt = ${prompts === "lines" ? `[\n${rows.map((text) => `    ${text},\n`).join("")}]` : py(prompt)}`;
}

/** The snippet for a predicted clock, on which every run chooses the same draft lengths, so it needs no recorded ones. */
function predictedSnippet(head) {
  return `${[
    `from bass_core import ${["Hardware", "ModelSize"].filter((own) => head.code.includes(`${own}(`))
      .map((own) => `${own}, `).join("")}SamplingParams, SimulatedClock, load_pair, race`, "", loadLine(head),
    "settings = dict(", ...argumentLines(head, new Set(["prompt"])), ")", promptLine(head.settings),
    `clock = ${head.code}`, "*_, last = race(pair, prompt, clock=clock, **settings)", "",
    'for name, lane in last["lanes"].items():', '    print(name, lane["metrics"]["ms_per_token"], "ms per token, predicted")',
    '    for row, sequence in enumerate(lane["sequences"], start=1):',
    '        print(f"--- {name}, sequence {row}\\n{sequence[\'text\']}")',
  ].join("\n")}\n`;
}

export function snippet() {
  const { head, lanes } = run();
  if (head.clock) return head.code ? predictedSnippet(head) : "";
  const { settings: s } = head, byLine = s.prompts === "lines";
  const lines = [
    "from bass_core import RecordedLengths, SamplingParams, generate, load_pair", "", loadLine(head),
    "settings = dict(", ...argumentLines(head), ")", promptLine(s), "texts = {}",
  ];
  if (s.time_budget_ms) lines.push(`# The run stopped at ${s.time_budget_ms} ms of lane time; this code has no time limit.`);
  for (const lane of lanes.values()) lines.push("", ...laneLines(lane, s.batch_size, byLine ? "prompt[i]" : "prompt"));
  lines.push("", "for lane, rows in texts.items():", "    for row, text in enumerate(rows, start=1):",
    '        print(f"--- {lane}, sequence {row}\\n{text}")');
  return `${lines.join("\n")}\n`;
}

/** The snippet's lines for one lane. `own` is the Python expression for the prompt of sequence i. */
function laneLines(lane, n, own) {
  const { all, rows } = lengthsOf(lane);
  const call = (more, prompt = "prompt") => `generate(pair, ${prompt}, method=${py(lane.name)}, ${more}**settings)`;
  const name = py(lane.name), keep = `texts[${name}] = [s.text for s in out.sequences]`;
  if (all && !all.length) return [`out = ${call(`n=${n}, `)}`, keep];
  if (all) return [`lengths = ${pyList(all)}`, `out = ${call(`n=${n}, draft_length=RecordedLengths(lengths), `)}`, keep];
  return [
    "# One sequence at a time, each with its own draft lengths.", "lengths = [",
    ...rows.map((row) => `    ${row.length ? pyList(row) : "[1]"},`), "]", `texts[${name}] = []`,
    "for i, own in enumerate(lengths):",
    `    out = ${call("sequence_ids=[i], draft_length=RecordedLengths(own), ", own)}`,
    `    texts[${name}].append(out.sequences[0].text)`,
  ];
}

export function link(settings) {
  const values = new URLSearchParams();
  for (const [name, value] of Object.entries(settings)) {
    if (value !== null) values.set(name, Array.isArray(value) ? value.join(" ") : String(value));
  }
  return `${location.origin}${location.pathname}#${HASH}?${values}`;
}

/** The form's new values. Settings that the address lacks, or whose value there is not on offer, keep their value
    in `now`. */
export function restore(allowed, now) {
  const values = location.hash.startsWith(`#${HASH}?`) ? new URLSearchParams(location.hash.slice(HASH.length + 2)) : null;
  return Object.entries(allowed).map(([name, { control, choices }], i) => {
    const text = values?.get(name);
    if (text === null || text === undefined) return now[i];
    const known = (value) => choices === null || choices.includes(value);
    if (control === "boxes") {
      const chosen = text.split(" ").filter(known);
      return chosen.length ? chosen : now[i];
    }
    if (control === "number") return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : now[i];
    return known(text) ? text : now[i];
  });
}

// Following a link in this tab, or going back or forward, changes only the hash, so reload the page to read it. Going back to
// the settings that the page has read or written, for example from a section of "How it works", keeps the page and its race.
let known = location.hash;
/** Put a link's settings into the address. */
export function keep(address) {
  history.replaceState(null, "", address);
  known = location.hash;
}
window.addEventListener("hashchange", () => location.hash.startsWith(`#${HASH}?`) && location.hash !== known && location.reload());

export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const anchor = Object.assign(document.createElement("a"), { href: address, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** Copy text and return true on success. If the page may not write to the clipboard, copy a selection instead. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
