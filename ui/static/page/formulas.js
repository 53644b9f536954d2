/* Opens the formula of a figure beside its question mark. Contract: the browser's popovers open and close, by pointer,
   touch and keyboard alike; this file places them, and makes the buttons of figures that scripts draw. */
(() => {
  "use strict";
  const { make } = window.Bass;
  const GAP = 6;
  let opener = null;

  /** The button of a figure, as ui/words/formulas.py makes it. */
  function what(key) {
    const button = make("button", "what");
    button.type = "button";
    button.setAttribute("popovertarget", `what-${key}`);
    button.setAttribute("aria-label", "Formula");
    button.setAttribute("aria-describedby", `what-${key}`);
    return button;
  }

  function place(formula) {
    if (!opener?.isConnected) return;
    const at = opener.getBoundingClientRect(), own = formula.getBoundingClientRect();
    const { clientWidth: width, clientHeight: height } = document.documentElement;
    const left = Math.max(GAP, Math.min(at.left - 12, width - own.width - GAP));
    const below = at.bottom + GAP, top = below + own.height > height - GAP ? at.top - own.height - GAP : below;
    Object.assign(formula.style, { left: `${left}px`, top: `${Math.max(GAP, top)}px` });
  }

  // Popovers don't say which button opened them.
  document.addEventListener("click", (event) => (opener = event.target.closest?.(".what") ?? opener), true);
  document.addEventListener("toggle", (event) => {
    if (event.target.matches?.(".formula") && event.newState === "open") place(event.target);
  }, true);
  window.addEventListener("scroll", () => document.querySelector(".formula:popover-open")?.hidePopover(), { passive: true });

  window.Bass.what = what;
})();
