/* The lines of bass_core/reference.py that a recorded round runs, with the values of its variables after each line. Draws
   nothing. ruleOf(step) is the rule that judged a round (a key of RULES in step.js). trace(step, own) follows one row
   through `step` and its judge, or returns null for a rule that is not in the file. Each state is
   - mark: the line (ui/race/code.py). note: what it does, in words.
   - drafts, qs: how many x and q are known. p: whether the model was asked.
   - tested, chances: how many r and h are known. testing: the draft that this line tests, or null.
   - n: accepted drafts, or null. over: whether the drafts from n on are rejected. t: whether the model's token is known.
   tests/ui/test_code.py compares the lines and values with a run of the file. */
import { run, coin, greedy, chance, quoted } from "bass/race/run.js";

// What a draft's source does; other sources say what may come next.
const NOTES = { copy: "The draft copies the next word from the text.", grammar: "The grammar allows only this token." };

/** Recordings without details don't name the rule, so it is inferred. */
export function ruleOf(step) {
  if (step.detail) return step.detail.rule;
  if (coin() !== null) return "coin";
  if (greedy()) return "greedy";
  if (step.parents) return "tree";
  if (step.drafts.length && step.drafts.every((draft) => draft.u === null)) return "coupled";
  return run().head.together ? "block" : "rejection";
}

/** Lines of `step` up to the judge's call. `put` adds a state. */
function drafting(step, put, together) {
  const { drafts } = step, most = Math.max(...step.record.rows.map((row) => row.drafted.length));
  const places = step.record.rows.reduce((sum, row) => sum + row.drafted.length + 1, 0), sources = step.detail?.sources ?? [];
  for (let i = 0; i < most; i += 1) {
    put("step.L2", { note: `i = ${i}` });
    put("step.L3", { note: NOTES[sources[i]] ?? "The draft says what may come next." });
    put("step.rows", { note: `Row ${step.sequence + 1} is shown.` });
    put("step.if", { note: i < drafts.length ? "This row drafts." : "This row has all its drafts." });
    if (i >= drafts.length) continue;
    put("step.q", { qs: i + 1, note: "q: how likely is each word, says the draft." });
    put("step.L4", { drafts: i + 1, note: `x[${i}] = ${quoted(drafts[i].text)}, with q = ${chance(drafts[i].q)}` });
  }
  put("step.L2", { note: most ? "All is drafted." : "Nothing is drafted: gamma is 0." });
  put("step.L7", { p: true, note: `The model checks ${places} ${places === 1 ? "place" : "places, of all rows,"} in one go.` });
  put("step.verdict", { note: together ? "The drafts of a row are judged together." : "Draft by draft." });
  put("step.return", { note: "Each row is judged alone." });
}

/** Lines of `judge`. */
function oneByOne(step, put, isGreedy) {
  const { drafts, accepted } = step, gamma = drafts.length;
  put("judge.n", { n: 0, note: `n = 0, gamma = ${gamma}` });
  for (let n = 0; n <= accepted && n < gamma; n += 1) {
    const { p, q, u } = drafts[n], passed = n < accepted, verdict = passed ? "accepted" : "rejected";
    const note = isGreedy ? `The model's own choice is ${passed ? "this" : "another"} word: ${verdict}`
      : `${chance(u)} · ${chance(q)} ${passed ? "<" : "≥"} ${chance(p)}: ${verdict}`;
    put("judge.L9", { tested: n + 1, testing: n, over: !passed, note });
    if (passed) put("judge.L10", { n: n + 1, note: `n = ${n + 1}` });
  }
  if (accepted === gamma) put("judge.L9", { note: gamma ? "No draft is left." : "No draft to test." });
}

/** Lines of `judge_together`. */
function block(step, put) {
  const { drafts, accepted } = step, gamma = drafts.length;
  let reach = 1, n = 0;
  put("judge_together.n", { n, note: `n = 0, gamma = ${gamma}` });
  drafts.forEach(({ p, q, u, chance: h }, i) => {
    const joint = reach * p;
    reach = joint < q ? joint / q : Number(joint > 0);
    put("judge_together.for", { note: `i = ${i}`, testing: i });
    put("judge_together.reach", { note: `${chance(p)} / ${chance(q)} and those before: ${chance(reach)}`, testing: i });
    put("judge_together.h", { note: `h = ${chance(reach)}`, testing: i });
    const weighed = i + 1 < gamma && reach < 1;
    put("judge_together.last", { testing: i, chances: weighed ? i : i + 1, note: weighed ? "A draft follows, which may make up for it." : "h stays." });
    if (weighed) {
      put("judge_together.excess", { note: "What p has beyond q at the next place.", testing: i });
      put("judge_together.rest", { chances: i + 1, note: `h = ${chance(h)}`, testing: i });
    }
    put("judge_together.test", { tested: i + 1, testing: i, note: `${chance(u)} ${u < h ? "<" : "≥"} ${chance(h)}: ${u < h ? "passed" : "failed"}` });
    if (u < h) put("judge_together.accept", { n: (n = i + 1), note: `n = ${n}: it is accepted, with all before it.` });
  });
  // Drafts after the end of the text are not recorded, and one of them may have been the last that passed.
  const said = n < accepted ? "A draft after the end of the text passed." : n < gamma ? `${gamma - n} of ${gamma} are rejected.` : "All are accepted.";
  put("judge_together.for", { n: accepted, over: true, note: said });
}

/** The last lines, the same in both judges. */
function ending(step, own, put, judge, isGreedy) {
  const { accepted, drafts, written } = step, rejected = accepted < drafts.length;
  put(`${judge}.L12`, { over: true, note: "The model's own word at this place." });
  put(`${judge}.L13`, { note: rejected ? "A draft was rejected." : "No draft was rejected." });
  if (rejected) put(`${judge}.L14`, { note: isGreedy ? "The draft is left out." : "What q has too much is left out, so that the text is distributed as p." });
  put(`${judge}.L17`, { t: true, note: own ? `t = ${quoted(own.text)}${rejected ? ", in place of the rejected draft" : ""}` : "The text has ended: t is not written." });
  put(`${judge}.L18`, { note: `${written} ${written === 1 ? "token" : "tokens"} from one step of the model.` });
}

export function trace(step, own) {
  const rule = ruleOf(step), together = rule === "block", isGreedy = rule === "greedy";
  if (!["rejection", "block", "greedy"].includes(rule) || step.parents) return null;
  const states = [], first = { drafts: 0, qs: 0, p: false, tested: 0, chances: 0, n: null, over: false, t: false };
  const put = (mark, changes) => states.push({ ...first, ...states.at(-1), testing: null, ...changes, mark });
  drafting(step, put, together);
  if (together) block(step, put);
  else oneByOne(step, put, isGreedy);
  ending(step, own, put, together ? "judge_together" : "judge", isGreedy);
  return states;
}

