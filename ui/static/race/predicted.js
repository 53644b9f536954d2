/* Marks what is predicted and not measured. Contract: in a race whose clock is a predicted one (the head's clock), every
   element with data-predicted wears a mark that says so, in text: "badge" a button that opens the assumptions, "word"
   the word alone, "here" that it is of this machine after all; [data-predicted-text] holds other words for such a
   race. In a measured race none of them is in the document. Bass.clock() is null for measured times. */
(() => {
  "use strict";
  const { on, run, make, setText, number, percent } = window.Bass;
  const CARD = "predicted-card";
  // What the assumptions are called, with their units; others are shown under their own names.
  const ASSUMED = {
    bandwidth: ["share of the memory bandwidth that a step reaches", percent],
    compute: ["share of the FLOP/s that a step reaches", percent],
    link: ["share of the link between GPUs that a step reaches", percent],
    layer_us: ["a layer, besides reading and multiplying", (v) => number(v, 1, " µs")],
    allreduce_us: ["an all-reduce, besides moving its bytes", (v) => number(v, 1, " µs")],
  };

  const clock = () => run()?.head.clock ?? null;

  /** "lane time", or what it is in a predicted race. */
  const laneTime = () => (clock() ? "predicted lane time" : "lane time");

  /** A text that says of itself whether its times are predicted. */
  const wear = (text) => (clock() ? `${text}, predicted` : text);

  function markOf(kind) {
    if (kind === "word") return make("span", "predicted", " predicted");
    if (kind === "here") return make("span", "predicted-here", " this machine");
    const button = make("button", "predicted predicted-badge", "predicted");
    button.type = "button";
    button.setAttribute("popovertarget", CARD);
    button.title = "What is assumed";
    return button;
  }

  /** Put on every mark of a predicted race, or take all off. */
  function mark() {
    const on = Boolean(clock());
    document.body.classList.toggle("predicts", on);
    for (const element of document.querySelectorAll("[data-predicted]")) {
      const worn = element.querySelector(":scope > :is(.predicted, .predicted-here)");
      if (on && !worn) element.append(markOf(element.dataset.predicted));
      else if (!on) worn?.remove();
    }
    for (const element of document.querySelectorAll("[data-predicted-text]")) {
      element.dataset.measuredText ??= element.textContent;
      setText(element, on ? element.dataset.predictedText : element.dataset.measuredText);
    }
    for (const drawn of document.querySelectorAll("figure:has([data-predicted=badge]) .plot, .strip canvas")) {
      drawn.setAttribute("aria-label", wear(drawn.getAttribute("aria-label").replace(/, predicted$/, "")));
    }
    const about = document.querySelector(".about-clock");
    if (about) setText(about, on ? `Lane times: predicted for ${run().head.machine}` : "");
  }

  function pairs(list, rows) {
    list.replaceChildren(...rows.flatMap(([name, value]) => [make("dt", "", name), make("dd", "", value)]));
  }

  /** The card with the assumptions, made at its first use. */
  function card() {
    const found = document.getElementById(CARD);
    if (found) return found;
    const made = make("div", "predicted-card");
    made.id = CARD;
    made.popover = "auto";
    made.setAttribute("role", "dialog");
    made.setAttribute("aria-label", "What is predicted, and what is assumed");
    const close = make("button", "action", "Close");
    close.type = "button";
    Object.assign(close, { popoverTargetElement: made, popoverTargetAction: "hide" });
    made.append(make("h2", "", "Predicted, not measured"), make("p", "predicted-times"), make("p", "predicted-texts"),
      make("h3", "", "Assumed"), make("dl"), make("p", "predicted-source"), close);
    // Inside Gradio's container, whose styles it shares; the top layer shows it above everything.
    (document.querySelector(".bass-lanes") ?? document.body).append(made);
    return made;
  }

  function describe() {
    const now = clock();
    if (!now) return document.getElementById(CARD)?.remove();
    const made = card(), { machine, settings } = run().head, coin = settings.acceptance;
    const say = (part, text) => setText(made.querySelector(part), text);
    say(".predicted-times", `Every time, and every figure made of times, is predicted for ${machine}: what it would take for exactly ` +
      "the forwards of this run, with their tokens, rows and cached lengths. A forward takes the longer of reading its bytes and multiplying.");
    say(".predicted-texts", `${Number.isFinite(coin)
      ? `A coin accepts each draft with a chance of ${coin}: the acceptance is chosen, and the texts mean nothing.`
      : "Texts, drafts and acceptances are this run's, of the small models on this machine."} Device and memory are this machine's.`);
    const assumed = Object.entries(now.assumptions ?? {}).map(([name, value]) => {
      const [words, show] = ASSUMED[name] ?? [name.replaceAll("_", " "), (v) => `${v}`];
      return [words, Number.isFinite(value) ? show(value) : `${value}`];
    });
    pairs(made.querySelector("dl"), [["GPUs", `${now.gpus ?? 1}`], ["target", `${now.target ?? "n/a"}`],
      ["draft", `${now.draft ?? "n/a"}`], ...assumed]);
    say(".predicted-source", now.source ? `Source: ${now.source}` : "");
  }

  on("start", () => queueMicrotask(() => {
    // After all other listeners, which may make lanes first.
    mark();
    describe();
  }));

  Object.assign(window.Bass, { clock, laneTime, wear });
})();
