/* What happens in a race, in spoken sentences computed from its records. Draws nothing: said.js shows them.
   narrate(race, view) takes a race (times.js) and its last view, or null while it runs. It returns sentences in the order of
   time, as {ms, text, star, first}: star ones are shown at real speed too, and for the first of each kind the opening slows
   down. With one row, no round before the first one whose guesses all hold has such a first: that one says why guessing pays.
   The narrator is the last lane that drafts, if possible for several rows at once. */
import { number, bisect } from "bass/page/page.js";
import { chainOf, draftedBy, sum } from "bass/race/times.js";

const WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight"];
// An accepted text of more words is not quoted.
const QUOTED = 4;
// A sentence names a faster decoder only if its lead is larger than this.
const LEAD = 1.05;
/** A lane that guesses in fewer of its rounds gets another reason: its plain rounds don't show the price of checking. */
export const OFTEN = 0.8;
const inWords = (count) => WORDS[count] ?? `${count}`;
const all = (count) => (count === 2 ? "Both" : `All ${count}`);
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const tokens = (count) => `${count} ${count === 1 ? "token" : "tokens"}`;
const short = (value) => number(value, value % 1 ? 1 : 0);
const quote = (text) => `“${text.trim().replace(/\s+/g, " ")}”`;
const label = ({ head }, { name }) => head.looks?.[name]?.label ?? name;

const article = (name) => `${/^([AEIOU]|NV)/.test(name) ? "an" : "a"} ${name}`;

/** Where a recording was made, from its own fields: "two cores of a Xeon with AMX", or the name of its GPU. */
export function machineOf({ about = "", made }) {
  const [, name, cores] = /^(.*), (\d+) cores\b/.exec(made?.device ?? "") ?? [];
  if (!cores) return article(made?.device ?? "machine");
  const [, family] = /\b(Xeon|EPYC|Core|Ryzen|Apple M\d+|Neoverse\S*)\b/.exec(name) ?? [], machine = family ?? name.replace(/\((R|TM)\)/g, "");
  const kernels = /own kernels with (\w+)/.exec(about)?.[1];
  return `${inWords(Number(cores))} ${cores === "1" ? "core" : "cores"} of ${article(machine)}${kernels ? ` with ${kernels}` : ""}`;
}

/** How long it takes to read a sentence, in ms. */
export const readingTime = (text) => 400 + 160 * text.split(" ").length;

/** In how many of its rounds a lane guessed. */
export const guessing = (lane) => lane.rounds.filter(({ record: { rows } }) => rows.some(({ drafted }) => drafted.length)).length;

export function narrator(race) {
  const drafting = [...race.lanes.values()].filter(({ rows }) => rows.some(({ steps }) => steps.length));
  return drafting.findLast(({ rounds }) => rounds.some(({ record }) => record.rows.length > 1)) ?? drafting.at(-1) ?? null;
}

/** Whether all guesses of a row hold. Of a tree, the accepted path has to end at a leaf. */
const allHold = (row) => row.drafted.length > 0 && chainOf(row).length === row.accepted;
const holding = (count) => (count === 1 ? "The guess holds" : `${all(count)} hold`);

/** The outcome of a round of one row, as [its kind, the sentence]. */
function outcomeOfRow(race, lane, row) {
  const { sequence, start, written, accepted, drafted_text: texts } = row, chain = chainOf(row), wrong = chain[accepted];
  const own = written > accepted ? race.textAt(lane.name, sequence, start + written - 1) : null;
  if (wrong === undefined) return ["all", `${holding(accepted)}${own === null ? "" : ", and the model adds one"}: ${tokens(written)} from one step.`];
  const struck = texts?.[wrong]?.trim() ? quote(texts[wrong]) : "The next guess";
  if (!accepted) return ["none", `${struck} is wrong: struck. One token, as in Regular, but guessing cost time.`];
  const held = chain.slice(0, accepted).map((i) => texts?.[i] ?? "").join(""), few = held.trim() && held.trim().split(/\s+/).length <= QUOTED;
  const kept = few ? `${quote(held)} holds` : `${accepted} hold`;
  return ["some", `${kept}. ${struck} is wrong: struck.${own?.trim() ? ` The model writes ${quote(own)}.` : ""}`];
}

/** The same of a round of several rows. */
function outcomeOfRows(rows, written) {
  const counts = rows.map(({ accepted }) => accepted), most = Math.max(...counts), least = Math.min(...counts);
  if (rows.every(allHold)) {
    const adds = written === sum(counts) + rows.length;
    return ["all", `${holding(sum(counts))}${adds ? ", and the model adds one per row" : ""}: ${tokens(written)}.`];
  }
  if (rows.length === 1) {
    const number = rows[0].sequence + 1;
    return ["some", most ? `Row ${number} keeps ${most}. The next guess is wrong: struck, and replaced.` : `The guess of row ${number} is wrong: struck.`];
  }
  if (!most) return ["none", `Every first guess is wrong: ${tokens(written)}, as in Regular, but guessing cost time.`];
  if (most === least) return ["some", `Each row keeps ${most}. ${rows.some(allHold) ? "A further" : "The next"} guess is wrong: struck, and replaced.`];
  const [high, low] = [most, least].map((count) => rows[counts.indexOf(count)].sequence + 1);
  return ["rows", `Row ${high} keeps ${most}, row ${low} keeps ${least || "none"}. Nobody waits for the other.`];
}

const isCopied = ({ drafted, detail, certain }, forwards) => !certain && (detail ? detail.sources.every((source) => source === "copy") : !forwards && drafted.length > 0);

/** Which of a round's rows guess. */
function who(count, rows) {
  if (count < rows) return `${inWords(count)} of ${inWords(rows)} rows ${count === 1 ? "guesses" : "guess"}`;
  return `${count === 2 ? "both" : `all ${inWords(count)}`} guess`;
}

/** The sentences about the narrator's rounds. */
function rounds(race, lane, put) {
  const reference = race.lanes.get(race.head.reference), name = label(race, lane), last = new Map();
  let held = null;
  lane.rounds.forEach((round, i) => {
    const { record, begin, end, written } = round, drafting = record.rows.filter(({ drafted }) => drafted.length);
    for (const { sequence } of record.rows) last.set(sequence, i);
    const { length } = record.rows, stand = draftedBy(round);
    if (!drafting.length) return put(end, "plain", `${name}: nothing is guessed here, so it is a plain step.`);
    const guesses = sum(drafting.map(({ drafted }) => drafted.length)), each = drafting[0].drafted.length;
    const sure = drafting.every(({ certain }) => certain), copied = drafting.every((row) => isCopied(row, record.draft_forwards));
    if (sure) put(begin + 0.1 * (stand - begin), "certain", "The grammar allows nothing else here: certain, not guessed.");
    else if (copied) put(begin + 0.1 * (stand - begin), "copy", length === 1
      ? `${name} copies ${guesses} ${guesses === 1 ? "guess" : "guesses"} from the text; one step checks ${guesses === 1 ? "it" : "them"}.`
      : "The text says this already: copied, not computed.");
    else if (length === 1) put(begin + 0.1 * (stand - begin), "guess", `${name}: a small guesser writes ${tokens(each)} first.`);
    if (sure) put(stand, "check", `${name}: one step checks ${guesses} certain ${guesses === 1 ? "token" : "tokens"}.`);
    else if (length > 1) put(stand, "check", `${name}: ${who(drafting.length, length)}, and one step checks ${guesses} ${guesses === 1 ? "guess" : "guesses"}.`);
    else if (!copied) put(stand, "check", `The model checks ${each === 1 ? "it" : all(each).toLowerCase()} in one step.`);
    const [kind, text] = length > 1 ? outcomeOfRows(drafting, written) : outcomeOfRow(race, lane, drafting[0]);
    const holds = kind === "all" && held === null;
    if (holds) held = i;
    const plain = reference && bisect(reference.rounds.length, (at) => reference.rounds[at].end <= end), mean = plain && reference.rounds[plain - 1].end / plain;
    const writes = round.total / (i + 1), cost = end / (i + 1) / mean;
    if (held !== null && i === held + 2 && mean) {
      put(end, "mean", reference !== lane && writes / cost > LEAD * reference.rounds[plain - 1].total / plain ? `So ${name} is faster: ${short(writes)} tokens in the time of ${number(cost, 1)} steps.`
        : `A round writes ${short(writes)} tokens and takes as long as ${number(cost, 1)} steps.`);
    } else if (holds && reference && reference !== lane && written > length) {
      put(end, kind, `${holding(sum(drafting.map(({ accepted }) => accepted)))}: ${name} writes ${written} tokens in one step, ${label(race, reference)} ${length}.`);
    } else put(end, kind, text);
  });
  const longest = Math.max(...last.values());
  for (const [row, i] of last) if (i < longest) put(lane.rounds[i].end, "done", `Row ${row + 1} is done. The others go on.`);
}

/** Whether a lane's texts equal the reference lane's. */
const same = (race, { name, rows }, reference) =>
  rows.every(({ ids }, i) => ids.length === reference.rows[i].ids.length && race.equal(name, i, ids.length) === ids.length);

/** The last sentences, about the whole race. */
function ending(race, lane, reference, view) {
  const { speedup: speed, round_cost: cost, acceptance_rate: rate } = view.lanes[lane.name]?.metrics ?? {}, { length } = lane.rounds;
  if (!Number.isFinite(speed) || !Number.isFinite(cost)) return [];
  const names = [lane, reference].map((one) => label(race, one)), per = short(lane.total / length);
  const [level, rest] = (view.verdict.head ?? "").split(/ (?:were|are) level/), equal = rest !== undefined && names.every((name) => level.includes(name));
  const checked = number(sum(lane.rounds.map(({ record: { rows } }) => sum(rows.map(({ drafted }) => drafted.length + 1)))) / length, 0);
  const guessed = guessing(lane), rare = guessed < OFTEN * length, other = lane === [...race.lanes.values()].at(-1) ? "" : `${names[0]}: `;
  const price = (end) =>
    rare ? `It guessed in only ${guessed} of ${length} rounds: ${end}.` : `${per} tokens, but checking ${checked} takes as long as ${number(cost, 1)} steps here: ${end}.`;
  const wrong = 1 - rate, share = Math.abs(wrong - 0.5) < 0.05 ? "Half" : number(100 * wrong, 0, " %");
  const faster = `${number(speed, 1)} times as fast.`;
  const won = race.head.batch_size === 1 && same(race, lane, reference) ? `Same text, ${faster}` : `${per} tokens in the time of ${number(cost, 1)} steps: ${faster}`;
  const lost = !rare && wrong > 1 / 3 ? `${share} of the guesses are wrong, and checking them costs ${number(cost, 1)} steps: slower.` : price("slower");
  const said = [`${other}${equal ? price("level") : speed > 1 ? won : lost}`];
  const [first, second] = [lane, reference].sort((a, b) => a.clock - b.clock), sizes = [first, second].map(({ rows }) => sum(rows.map(({ ids }) => ids.length)));
  if (!race.head.settings?.time_budget_ms && sizes[0] < sizes[1] && (equal || (speed > 1) === (first === reference))) {
    said.push(`${label(race, first)} ended first because its text is shorter: ${sizes[0]} tokens of ${sizes[1]}.`);
  }
  return said;
}

export function narrate(race, view) {
  if (![...race.lanes.values()].some(({ reads, rounds: written }) => reads.length || written.length)) return [];
  const sentences = [], kinds = new Set(), { batch_size: rows, reference: name } = race.head, reference = race.lanes.get(name), lane = narrator(race);
  const put = (ms, kind, text, star = false, counts = true) => {
    sentences.push({ ms, text, star, first: counts && !kinds.has(kind) });
    if (counts) kinds.add(kind);
  };
  const count = race.lanes.size;
  put(0, "start", rows > 1 ? `Now ${inWords(rows)} people ask at once.`
    : `The question is read. ${count > 1 ? `${capital(inWords(count))} decoders of one model begin` : "The model begins"} to answer.`, true);
  const step = reference?.rounds[0];
  if (step) put(step.end, "step", rows > 1 ? `${label(race, reference)}: one step writes a token for each of the ${inWords(rows)}.` : `${label(race, reference)}: one step of the model writes one token.`);
  for (const other of race.lanes.values()) {
    const [first] = other.rounds;
    if (rows > 1 && other !== lane && other !== reference && first?.record.rows.length === 1) {
      put(first.begin + 0.1 * (first.end - first.begin), "waits", `${label(race, other)}: one row after another: ${rows === 2 ? "row 2 waits" : `rows 2 to ${rows} wait`}.`);
    }
  }
  const pays = rows === 1 && lane?.rounds.find(({ record }) => record.rows.every(allHold));
  if (lane) rounds(race, lane, (ms, kind, text) => put(ms, kind, text, false, ms > (pays ? pays.begin : -1)));
  sentences.sort((a, b) => a.ms - b.ms);
  if (view?.done && lane && reference && lane !== reference) for (const text of ending(race, lane, reference, view)) put(race.end, text, text, true);
  return sentences;
}
