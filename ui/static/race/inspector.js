/* The step inspector: one round of one sequence, in the table of step.js. It works during and after a run. During the run, it
   draws only while in view. Drafts that branch are drawn as a tree: depth from left to right, siblings below each other
   in the order of drafting, but the accepted path and the target's own token first, so that the top line is the text.
   Pointer, focus and touch select a node, whose numbers appear below. Arrow keys work as in any ARIA tree. */
import { on, tell, soon, number, setText, make, svg } from "bass/page/page.js";
import {
  run, roundsIn, offerLanes, offerRows, chance, bare, quoted, pathOf, parentsOf, verdicts, greedy,
} from "bass/race/run.js";
import { laneTime } from "bass/race/predicted.js";
import { tape } from "bass/race/tape.js";
import { openRound, ruleWords, tableOf, whole } from "bass/race/step.js";

export let pickRound = null;
export let inspect = null;
// A node's width and the bend of the lines to its children, in columns (page.css: .tree).
const WIDTH = 0.84, BEND = 0.92;

/** The known numbers of a draft, in words. At temperature 0 they mean nothing and are left out. */
function numbers({ p, q, u }) {
  if (greedy()) return "";
  const known = [["p(x)", p], ["q(x)", q], ["u", u]].filter(([, value]) => value !== null);
  return `; ${known.map(([name, value]) => `${name} ${chance(value)}`).join(", ") || "p(x) n/a"}`;
}

/** The nodes, parents first: the newest token, the drafts, the added token. Each is {text, kind, parent, share, about}. */
function nodesOf(step, newest, own) {
  const outcomes = verdicts(step), { drafts, parents } = step;
  const root = { text: newest?.text ?? "…", kind: "newest", parent: null, about: "newest token, which the drafts follow" };
  const nodes = [root, ...drafts.map((draft, i) => {
    const siblings = parents.flatMap((parent, j) => (parent === parents[i] ? [j] : []));
    const candidate = siblings.length > 1 ? `, candidate ${siblings.indexOf(i) + 1} of ${siblings.length}` : "";
    const verdict = outcomes[i] === "untested" ? "not tested" : outcomes[i];
    return { text: draft.text, kind: outcomes[i], parent: parents[i] + 1, share: draft.p, about: `${verdict}${candidate}${numbers(draft)}` };
  })];
  if (own) {
    const parent = (pathOf(step).at(-1) ?? -1) + 1;
    nodes.push({ text: own.text, kind: own.origin, parent, share: step.next_p, about: `${own.origin}, the target's own token${numbers({ p: step.next_p, q: null, u: null })}` });
  }
  return nodes;
}

/** Set each node's children, column and row. The first child shares its parent's row. */
function layOut(nodes) {
  const rank = { accepted: 0, recovered: 0, bonus: 0, sampled: 0 };
  for (const node of nodes) node.children = [];
  for (const node of nodes.slice(1)) nodes[node.parent].children.push(node);
  let row = 0;
  const put = (node, column) => {
    Object.assign(node, { column, row });
    node.children.sort((a, b) => (rank[a.kind] ?? 1) - (rank[b.kind] ?? 1));
    node.children.forEach((child, i) => {
      if (i) row += 1;
      put(child, column + 1);
    });
  };
  put(nodes[0], 0);
  return { rows: row + 1, columns: 1 + Math.max(...nodes.map((node) => node.column)) };
}

function edges(nodes, { rows, columns }) {
  const drawing = svg("svg", { viewBox: `0 0 ${columns} ${rows}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  // Draw the accepted path last, on top of the others.
  const drawn = nodes.slice(1).sort((a, b) => (a.kind === "accepted") - (b.kind === "accepted"));
  for (const { kind, parent, column, row } of drawn) {
    const from = nodes[parent];
    const line = `M${from.column + WIDTH} ${from.row + 0.5}H${from.column + BEND}V${row + 0.5}H${column}`;
    drawing.append(svg("path", { d: line, class: `edge-${kind}` }));
  }
  return drawing;
}

class Tree {
  constructor(element) {
    this.element = element;
    this.tree = element.querySelector(".tree");
    this.line = element.querySelector(".tree-line");
    this.tree.addEventListener("pointerover", (event) => this.describe(this.nodeAt(event) ?? this.active));
    this.tree.addEventListener("pointerleave", () => this.describe(this.active));
    this.tree.addEventListener("focusin", (event) => this.choose(this.nodeAt(event)));
    this.tree.addEventListener("click", (event) => this.choose(this.nodeAt(event)));
    this.tree.addEventListener("keydown", (event) => this.key(event));
  }

  nodeAt(event) {
    return this.nodes?.find(({ item }) => item === event.target.closest("[role=treeitem]"));
  }

  /** Draw the tree of a step, or hide it for null. `newest` is the token before the drafts, `own` the one after the path. */
  draw(step, newest, own) {
    this.element.hidden = !step;
    if (!step || (step === this.step && own === this.own)) return;
    Object.assign(this, { step, own });
    const focused = this.tree.contains(document.activeElement);
    this.nodes = nodesOf(step, newest, own);
    const size = layOut(this.nodes);
    for (const node of this.nodes) node.item = this.item(node);
    this.tree.style.setProperty("--columns", size.columns);
    this.tree.style.setProperty("--rows", size.rows);
    // The order of the arrow keys: down the first branch, then the next one.
    this.order = [];
    const walk = (node) => {
      this.order.push(node);
      node.children.forEach(walk);
    };
    walk(this.nodes[0]);
    this.tree.replaceChildren(edges(this.nodes, size), ...this.order.map(({ item }) => item));
    this.active = null;
    this.choose(this.nodes[(pathOf(step).at(-1) ?? 0) + 1]);
    if (focused) this.active.item.focus({ preventScroll: true });
  }

  item(node) {
    const item = make("div", `node node-${node.kind}`, bare(node.text));
    item.setAttribute("role", "treeitem");
    item.setAttribute("aria-level", node.column + 1);
    item.setAttribute("aria-label", `${quoted(node.text)}: ${node.about}`);
    if (node.children.length) item.setAttribute("aria-expanded", "true");
    item.tabIndex = -1;
    item.style.setProperty("--column", node.column);
    item.style.setProperty("--row", node.row);
    if (node.share !== undefined && node.share !== null) item.style.setProperty("--share", Math.min(1, node.share));
    return item;
  }

  choose(node) {
    if (!node) return;
    if (this.active) this.active.item.tabIndex = -1;
    this.active?.item.removeAttribute("aria-selected");
    this.active = node;
    node.item.tabIndex = 0;
    node.item.setAttribute("aria-selected", "true");
    this.describe(node);
  }

  describe(node) {
    if (node) setText(this.line, `${quoted(node.text)}: ${node.about}`);
  }

  key(event) {
    const at = this.order.indexOf(this.active);
    const next = {
      ArrowRight: this.active.children[0], ArrowLeft: this.nodes[this.active.parent], ArrowDown: this.order[at + 1],
      ArrowUp: this.order[at - 1], Home: this.order[0], End: this.order.at(-1),
    }[event.key];
    if (!next) return;
    next.item.focus();
    event.preventDefault();
  }
}

/** Whether the drafts are not a simple chain, so that they need a tree. */
const branches = (step) => parentsOf(step).some((parent, i) => parent !== i - 1);

/** The number of drafts in the longest branch. */
function depthOf(step) {
  const depths = [];
  for (const parent of parentsOf(step)) depths.push(1 + (parent < 0 ? 0 : depths[parent]));
  return Math.max(...depths);
}

class Inspector {
  constructor(element) {
    this.element = element;
    this.tree = new Tree(element.querySelector(".tree-part"));
    this.pick = Object.fromEntries([...element.querySelectorAll("[data-pick]")].map((e) => [e.dataset.pick, e]));
    this.table = element.querySelector(".round-scroll");
    this.line = element.querySelector(".round-line");
    this.note = element.querySelector(".round-note");
    this.seen = false;
    this.newest = this.newest.bind(this);
    this.redraw = () => (this.pick.follow.checked ? this.newest() : this.draw());
    for (const name of ["lane", "sequence"]) {
      this.pick[name].addEventListener("change", () => this.go(this.steps().length - 1, true));
    }
    this.pick.round.addEventListener("change", () => this.go(Number(this.pick.round.value) - 1));
    this.pick.follow.addEventListener("change", this.newest);
    for (const button of element.querySelectorAll("[data-step]")) {
      button.addEventListener("click", () => this.go(this.at + Number(button.dataset.step)));
    }
    on("start", (head) => this.start(head));
    on("line", () => this.seen && soon(this.newest));
    on("phase", this.newest);
    on("instant", ({ jumped }) => jumped && soon(this.redraw));
    // While a recording plays, rounds end between two instants.
    on("playhead", () => this.seen && this.steps().length !== this.count && this.redraw());
    new IntersectionObserver((entries) => {
      this.seen = entries.at(-1).isIntersecting;
      this.newest();
    }).observe(element);
  }

  start(head) {
    const { lanes, batch_size: count } = head, again = this.head === head;
    this.head = head;
    // The same head again means a jump back in the run: keep the reader's choice. The table is drawn after the jump.
    if (again) return;
    const before = this.pick.lane.value;
    offerLanes(this.pick.lane, lanes);
    this.pick.lane.value = lanes.includes(before) ? before : lanes.at(-1);
    offerRows(this.pick.sequence, count);
    this.at = 0;
    this.pick.follow.checked = true;
    this.draw();
  }

  /** The rounds of the chosen sequence, without its prefill. */
  steps() {
    return roundsIn(run()?.lanes.get(this.pick.lane.value)?.sequences[Number(this.pick.sequence.value)]);
  }

  /** Show the newest round if the reader follows it. */
  newest() {
    const rounds = this.steps().length;
    if (!this.pick.follow.checked) return setText(this.element.querySelector("[data-rounds]"), `of ${rounds}`);
    this.at = Math.max(0, rounds - 1);
    this.draw();
  }

  /** Show the round at this index, and stop following the newest one. */
  go(at, follow = false) {
    this.pick.follow.checked = follow;
    this.at = Math.max(0, Math.min(Number.isFinite(at) ? Math.round(at) : 0, this.steps().length - 1));
    this.draw();
    tell("round", { lane: this.pick.lane.value, row: Number(this.pick.sequence.value) + 1, round: this.at + 1 });
  }

  draw() {
    const steps = this.steps(), step = steps[this.at];
    this.count = steps.length;
    setText(this.element.querySelector("[data-rounds]"), `of ${steps.length}`);
    this.pick.round.max = steps.length;
    const lane = run()?.lanes.get(this.pick.lane.value);
    const tree = Boolean(step) && branches(step);
    this.table.hidden = tree || !step?.drafts.length;
    if (document.activeElement !== this.pick.round) this.pick.round.value = step ? this.at + 1 : "";
    if (!tree) this.tree.draw(null);
    if (!step) return setText(this.line, Inspector.missing(steps.length));
    const { tokens } = lane.sequences[Number(this.pick.sequence.value)];
    const own = tokens[step.start + step.written - 1], ended = step.written === step.accepted;
    setText(this.line, this.sentence(step, own, ended));
    setText(this.note, step.drafts.length ? ruleWords(step) : "");
    if (!step.drafts.length) return;
    if (tree) this.tree.draw(step, tokens[step.start - 1], ended ? null : own);
    else this.table.replaceChildren(tableOf(whole(step), step));
  }

  /** Why there is no round to show. */
  static missing(rounds) {
    if (!run()) return "No round yet: press Run.";
    return rounds ? "This round has not ended at this point of the race." : "This sequence has no rounds yet.";
  }

  sentence(step, own, ended) {
    const at = `The lane's round ${step.round}, which ended at ${number(step.time_ms, 0)} ms of ${laneTime()}: `;
    if (!step.drafts.length) return `${at}nothing was drafted; the target wrote ${quoted(own.text)}${greedy() ? ", its most likely token" : `, p(x) ${chance(step.next_p)}`}.`;
    const tail = ended ? "the text ended there." : `then the ${own.origin} token ${quoted(own.text)}.`;
    const count = step.drafts.length, accepted = `${step.accepted} accepted, ${tail}`;
    if (branches(step)) return `${at}a tree of ${count} drafts, ${depthOf(step)} deep; ${accepted}`;
    return `${at}draft length ${step.length}, ${count} drafted, ${accepted}`;
  }
}

export const mountInspector = (element) => {
  const inspector = new Inspector(element.querySelector(".bass-inspector"));
  /** Show a step of a row in the inspector only. */
  pickRound = (lane, sequence, step) => {
    inspector.pick.lane.value = lane;
    inspector.pick.sequence.value = sequence;
    inspector.go(Math.max(0, inspector.steps().indexOf(step)));
  };
  /** Show a step of a row and run its code. While a race runs, only the inspector shows it. */
  inspect = (lane, sequence, step) => {
    pickRound(lane, sequence, step);
    const { complete, recorded, away } = tape.state;
    if (complete || recorded || away) openRound(lane, sequence, step);
    else inspector.element.scrollIntoView({ block: "nearest" });
  };
};
