/* Draws one row's drafts of a round as a tree. Contract: depth from left to right, siblings under one another as they
   were drafted, the accepted path first with the target's own token at its end, so that the top line is the text.
   Pointer, focus and touch choose a node, whose numbers then stand below; arrow keys walk as in any ARIA tree. */
(() => {
  "use strict";
  const { setText, make, chance, bare, quoted, pathOf, verdicts, greedy } = window.Bass;
  const NS = "http://www.w3.org/2000/svg";
  // A node's width and the bend of the lines to its children, in columns (page.css: .tree).
  const WIDTH = 0.84, BEND = 0.92;

  /** The numbers of a draft that exist; at temperature 0 they say nothing. */
  function numbers({ p, q, u }) {
    if (greedy()) return "";
    const known = [["p(x)", p], ["q(x)", q], ["u", u]].filter(([, value]) => value !== null);
    return `; ${known.map(([name, value]) => `${name} ${chance(value)}`).join(", ") || "p(x) n/a"}`;
  }

  /** The nodes, parents first, each {text, kind, parent, share, about}: the newest token, the drafts, the added token. */
  function nodesOf(step, newest, own) {
    const said = verdicts(step), { drafts, parents } = step;
    const root = { text: newest?.text ?? "…", kind: "newest", parent: null, about: "newest token, which the drafts follow" };
    const nodes = [root, ...drafts.map((draft, i) => {
      const siblings = parents.flatMap((parent, j) => (parent === parents[i] ? [j] : []));
      const place = siblings.length > 1 ? `, candidate ${siblings.indexOf(i) + 1} of ${siblings.length}` : "";
      const verdict = said[i] === "untested" ? "not reached" : said[i];
      return { text: draft.text, kind: said[i], parent: parents[i] + 1, share: draft.p, about: `${verdict}${place}${numbers(draft)}` };
    })];
    if (own) {
      const parent = (pathOf(step).at(-1) ?? -1) + 1;
      nodes.push({ text: own.text, kind: own.origin, parent, share: step.nextP, about: `${own.origin}, the target's own token${numbers({ p: step.nextP, q: null, u: null })}` });
    }
    return nodes;
  }

  /** Give each node its children, column and row; the first child stands in its parent's row. */
  function layOut(nodes) {
    const rank = { accepted: 0, recovered: 0, bonus: 0, sampled: 0 };
    for (const node of nodes) node.children = [];
    for (const node of nodes.slice(1)) nodes[node.parent].children.push(node);
    let row = 0;
    const place = (node, column) => {
      Object.assign(node, { column, row });
      node.children.sort((a, b) => (rank[a.kind] ?? 1) - (rank[b.kind] ?? 1));
      node.children.forEach((child, i) => {
        if (i) row += 1;
        place(child, column + 1);
      });
    };
    place(nodes[0], 0);
    return { rows: row + 1, columns: 1 + Math.max(...nodes.map((node) => node.column)) };
  }

  function edges(nodes, { rows, columns }) {
    const svg = document.createElementNS(NS, "svg");
    for (const [name, value] of [["viewBox", `0 0 ${columns} ${rows}`], ["preserveAspectRatio", "none"], ["aria-hidden", "true"]]) {
      svg.setAttribute(name, value);
    }
    // The accepted path last, on top of the others.
    const drawn = nodes.slice(1).sort((a, b) => (a.kind === "accepted") - (b.kind === "accepted"));
    for (const { kind, parent, column, row } of drawn) {
      const line = document.createElementNS(NS, "path"), from = nodes[parent];
      line.setAttribute("d", `M${from.column + WIDTH} ${from.row + 0.5}H${from.column + BEND}V${row + 0.5}H${column}`);
      line.setAttribute("class", `edge-${kind}`);
      svg.append(line);
    }
    return svg;
  }

  class Tree {
    constructor(element) {
      this.element = element;
      this.tree = element.querySelector(".tree");
      this.line = element.querySelector(".tree-line");
      this.tree.addEventListener("pointerover", (event) => this.tell(this.nodeAt(event) ?? this.active));
      this.tree.addEventListener("pointerleave", () => this.tell(this.active));
      this.tree.addEventListener("focusin", (event) => this.choose(this.nodeAt(event)));
      this.tree.addEventListener("click", (event) => this.choose(this.nodeAt(event)));
      this.tree.addEventListener("keydown", (event) => this.key(event));
    }

    nodeAt(event) {
      return this.nodes?.find(({ item }) => item === event.target.closest("[role=treeitem]"));
    }

    /** Draw a step's tree; null hides it. `newest` and `own`: the tokens before the drafts and behind the path. */
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
      // In the order in which the arrow keys walk: down the first branch, then the next.
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
      this.tell(node);
    }

    tell(node) {
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

  window.Bass.mountTree = (element) => new Tree(element);
})();
