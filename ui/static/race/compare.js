/* Compares each row's text with the reference lane's, where both must be equal (greedy or coupled). Contract:
   Bass.comparison() is the last snapshot's {lane: [row, ...]}; a row is null if both texts are equal as far as both
   go, else {at, ours, theirs, p_ours, p_theirs, tie}.
   For a run that ended before its last snapshot it is computed here, without the probabilities. It is null where
   the texts need not be equal. Bass.compared() is the same in words, {} for null. Draws nothing. */
(() => {
  "use strict";
  const { on, run, laneName, quoted } = window.Bass;
  // A near tie: the lesser of two scores is at least this share of the larger. bfloat16 has steps of 1/8 between
  // logits of 16 and 32, and exp(-1/8) is 0.88.
  const NEAR = 0.7;
  let cut = false;

  on("phase", (phase) => (cut = phase === "stopped" || phase === "error"));

  /** Whether the lanes of a run must write the same. */
  const owed = ({ lanes, reference, settings }) => lanes.length > 1 && lanes.includes(reference)
    && !Number.isFinite(settings.acceptance) && (settings.temperature === 0 || settings.verification === "coupled");

  function difference(ours, theirs) {
    const both = Math.min(ours.length, theirs.length);
    for (let at = 0; at < both; at += 1) {
      if (ours[at].id !== theirs[at].id) return { at, ours: ours[at].id, theirs: theirs[at].id };
    }
    return null;
  }

  function comparison() {
    if (!run()) return null;
    const { head, view, lanes } = run();
    if (view?.comparison) return view.comparison;
    if (!cut || !owed(head)) return null;
    const theirs = lanes.get(head.reference).sequences;
    const others = [...lanes.values()].filter(({ name }) => name !== head.reference);
    return Object.fromEntries(others.map(({ name, sequences }) => [
      name, sequences.map(({ tokens }, i) => difference(tokens, theirs[i].tokens)),
    ]));
  }

  /** Both numbers with two digits, or as many as are needed to tell them apart. */
  function chances(a, b) {
    const digits = [2, 3, 4, 5, 6].find((some) => a.toFixed(some) !== b.toFixed(some));
    return digits ? `${a.toFixed(digits)} against ${b.toFixed(digits)}` : `${a.toFixed(2)} each`;
  }

  function differs({ at, p_ours: ours, p_theirs: theirs, tie }) {
    const place = `differs at token ${at + 1}`;
    if (!Number.isFinite(ours) || !Number.isFinite(theirs)) return place;
    const dice = run().head.settings.temperature > 0 ? " after the random draw" : "";
    return `${place} (${tie >= NEAR ? `a near tie${dice}: ` : ""}${chances(ours, theirs)})`;
  }

  function words(lane, found, i) {
    const { head: { reference }, view, lanes } = run();
    const [ours, theirs] = [lane, reference].map((name) => lanes.get(name).sequences[i].tokens);
    if (found) {
      const [own, other] = [ours, theirs].map((tokens) => quoted(tokens[found.at]?.text ?? ""));
      return { text: differs(found), title: `${own} here, ${other} in ${laneName(reference)}`, differs: true };
    }
    if (!ours.length || !theirs.length) return { text: "" };
    const ended = (name) => ["eos", "length"].includes(view?.lanes[name]?.finish_reasons[i]);
    return { text: `same as ${laneName(reference)}${ended(lane) && ended(reference) ? "" : " so far"}` };
  }

  /** {lane: [{text, title, differs}]}; an empty list for the reference lane. */
  function compared() {
    const found = comparison(), reference = run()?.head.reference;
    if (!found || !run().lanes.has(reference)) return {};
    const lanes = Object.entries(found).filter(([name]) => run().lanes.has(name));
    return Object.fromEntries([
      [reference, []], ...lanes.map(([name, rows]) => [name, rows.map((row, i) => words(name, row, i))]),
    ]);
  }

  Object.assign(window.Bass, { comparison, compared, owed });
})();
