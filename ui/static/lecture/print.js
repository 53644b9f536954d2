/* The print sheet. Contract: before a print the page takes the print's width, light colours and type of the usual size,
   and every chart is drawn at that width, in view or not; afterwards all is as it was. Works for the Print buttons, the
   browser's own command, and a PDF. The run's settings, which the form shows only in part, stand on top in full. */
(() => {
  "use strict";
  const { run, make, plots } = window.Bass;
  const THEMES = ["dark", "presenting"];
  let before = null;

  /** The settings of the run on the page, as terms and values; empty ones are left out. */
  function listed() {
    const given = Object.entries(run()?.head.settings ?? {}).filter(([, value]) => value !== null && value !== "");
    return [...given, ["printed", new Date().toLocaleString("en")]].map(([name, value]) => {
      const line = make("div", name === "prompt" ? "print-prompt" : "");
      const text = Array.isArray(value) ? value.join(", ") : String(value);
      line.append(make("dt", "", name.replaceAll("_", " ")), make("dd", "", text));
      return line;
    });
  }

  function prepare(list) {
    if (before) return;
    const { classList } = document.body;
    before = THEMES.filter((name) => classList.contains(name));
    classList.remove(...THEMES);
    classList.add("printing");
    list.replaceChildren(...listed());
    list.hidden = false;
    plots.drawAll();
  }

  function restore(list) {
    if (!before) return;
    document.body.classList.remove("printing");
    document.body.classList.add(...before);
    list.hidden = true;
    before = null;
    plots.drawAll();
  }

  window.Bass.mountPrint = (element) => {
    const list = element.querySelector(".print-settings");
    window.addEventListener("beforeprint", () => prepare(list));
    window.addEventListener("afterprint", () => restore(list));
    document.addEventListener("click", (event) => event.target.closest("[data-print]") && window.print());
  };
})();
