/* Opens everything that shows times, and returns every visible text of the results by its place. */
async () => {
  const settle = (ms = 400) => new Promise((go) => setTimeout(go, ms));
  // Charts are drawn only in view, one after another.
  for (const figure of document.querySelectorAll("#results figure, .bass-inspector, .bass-summary")) {
    figure.scrollIntoView({ block: "center" });
    await settle();
  }
  const CONTAINERS = "figure, .pace, .figures > div, .readings > div, .verdict, tr, .state, .round-line, " +
    ".token-tip, .part-about, .snippet, .axis, .why li";
  const MARK = /predicted|this (machine|process)/i;
  const place = (node) => {
    const steps = [];
    for (let e = node; e.id !== "results"; e = e.parentElement) {
      steps.unshift(e.id || `${e.tagName}.${[...e.parentElement.children].indexOf(e)}`);
    }
    return steps.join(" ");
  };
  const found = {};
  const add = (element, text, key = place(element)) => {
    const holder = element.closest(CONTAINERS);
    const said = holder && [holder.textContent, ...[...holder.querySelectorAll("[aria-label]")].map((e) => e.ariaLabel)];
    found[key] = { text, says: Boolean(said?.some((words) => MARK.test(words))) };
  };
  const results = document.querySelector("#results");
  // A plot's texts change with its scale, so they count as one text.
  for (const plot of results.querySelectorAll(".plot")) {
    add(plot, [...plot.querySelectorAll("text")].map((e) => e.textContent).join("|"));
  }
  for (const row of results.querySelectorAll("[data-axis]")) {
    add(row, row.bars.map(({ begin, end }) => `${begin.toFixed(3)}-${end.toFixed(3)}`).join("|"));
  }
  const texts = document.createTreeWalker(results, NodeFilter.SHOW_TEXT);
  const own = new Map();
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || element.closest(".plot, script, style") || !element.checkVisibility()) continue;
    own.set(element, (own.get(element) ?? "") + node.data);
  }
  for (const [element, text] of own) add(element, text);
  return found;
}
