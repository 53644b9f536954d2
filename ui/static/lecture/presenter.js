/* Presenter mode: larger type, and the settings folded into a line. Contract: ?present=1 in the address enters it; the
   switch in the page's head enters and leaves it, changes the address and nothing of the run. The mode is a class on
   the body, for which plots are redrawn. The line says what Run would send, and during a race what is running. */
(() => {
  "use strict";
  const { on, run, number, setText } = window.Bass;
  const CLASS = "presenting";
  let words = {};

  /** Change one value of the address's query; null removes it. */
  function setQuery(name, value) {
    const address = new URL(location.href);
    if (value === null) address.searchParams.delete(name);
    else address.searchParams.set(name, value);
    history.replaceState(history.state, "", address);
  }

  const query = (name) => new URLSearchParams(location.search).get(name);
  const presenting = () => document.body.classList.contains(CLASS);

  /** A recording may lack its settings: then the line says what the page is about. */
  /** The line as [prompt, the rest]. */
  function inWords({ prompt = "", prompts, batch_size: batch, temperature, max_new_tokens: tokens, draft_length: length }) {
    const rows = prompts === "lines" ? prompt.split("\n").filter((line) => line.trim()).length : batch;
    if (!prompt) return [document.querySelector(".about-pair")?.textContent ?? "", ""];
    const parts = [
      prompts === "lines" ? `${number(rows, 0)} prompts` : `batch ${number(rows, 0)}`,
      `temperature ${temperature ?? "n/a"}`, `${number(tokens, 0)} tokens`, `drafts: ${words[length] ?? length}`,
    ];
    return [`“${prompt.trim().replace(/\s+/g, " ").slice(0, 200)}”`, parts.join(" · ")];
  }

  class Presenter {
    constructor(element) {
      this.bar = element.querySelector(".present-bar");
      this.line = this.bar.querySelector(".present-line");
      words = JSON.parse(this.bar.dataset.words);
      this.button = document.querySelector("[data-present]");
      this.button.addEventListener("click", () => this.set(!presenting()));
      this.line.addEventListener("click", (event) => {
        this.open(!this.opened);
        // After a click of the pointer Space shall hold the race, and not press this line again.
        if (event.detail > 0) this.line.blur();
      });
      document.addEventListener("bass:fold", () => this.open(false));
      this.form = null;
      this.racing = false;
      on("form", (form) => this.show({ form }));
      on("phase", (phase) => this.show({ racing: phase === "waiting" || phase === "running" }));
      on("start", () => this.show({}));
      if (query("present") === "1") this.set(true);
    }

    get opened() {
      return document.body.dataset.settings === "open";
    }

    /** Enter or leave; the run goes on as it was. */
    set(presented) {
      document.body.classList.toggle(CLASS, presented);
      setQuery("present", presented ? "1" : null);
      setText(this.button, presented ? "Leave presenter mode" : "Presenter mode");
      this.open(false);
    }

    open(opened) {
      if (!opened && document.activeElement?.closest("#settings") && presenting()) this.line.focus();
      document.body.dataset.settings = opened ? "open" : "folded";
      this.line.setAttribute("aria-expanded", String(opened));
    }

    show(news) {
      Object.assign(this, news);
      const shown = run()?.head.settings, next = this.form && inWords(this.form), now = shown && inWords(shown);
      const other = next && now && String(next) !== String(now);
      const [prompt, rest] = (this.racing && now) || next || now || inWords({});
      setText(this.line.querySelector(".present-prompt"), `${other && !this.racing ? "Next: " : ""}${prompt}`);
      setText(this.line.querySelector(".present-rest"), rest);
    }
  }

  window.Bass.mountPresenter = (element) => {
    new Presenter(element);
    window.Bass.mountKeys(element);
    window.Bass.mountPrint(element);
  };
  Object.assign(window.Bass, { presenting, query, setQuery });
})();
