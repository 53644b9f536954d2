/* The keys of presenter mode. Contract: a key acts in presenter mode alone, while its keys are on (keys=off in the address
   turns them off: WCAG 2.1.4), while the race is in sight, without Ctrl, Alt or Meta, and never in a field. Space and the
   arrows are left to whatever has the focus. */
(() => {
  "use strict";
  const { make, presenting, query, setQuery } = window.Bass;
  const FIELDS = "input, textarea, select, [contenteditable]:not([contenteditable='false']), [role='textbox']";
  const tell = (name) => document.dispatchEvent(new CustomEvent(`bass:${name}`));
  const press = (selector) => document.querySelector(selector)?.click();
  const presets = () => [...document.querySelectorAll("#presets button")].slice(0, 9);

  const KEYS = {
    r: () => press("#run"), s: () => press("#stop"), " ": () => tell("pause"), ArrowRight: () => tell("step"), ArrowLeft: () => tell("back"),
  };

  class Keys {
    constructor(element) {
      this.list = element.querySelector("dialog.keys");
      this.box = element.querySelector("[data-keys-on]");
      this.box.checked = query("keys") !== "off";
      this.box.addEventListener("change", () => setQuery("keys", this.box.checked ? null : "off"));
      element.querySelector("[data-keys]").addEventListener("click", () => this.open());
      element.querySelector("[data-keys-close]").addEventListener("click", () => this.list.close());
      document.addEventListener("keydown", (event) => this.take(event));
    }

    open() {
      this.list.querySelectorAll(".of-preset").forEach((line) => line.remove());
      this.list.querySelector("dl").append(...presets().map((button, i) => {
        const line = make("div", "of-preset"), key = make("dt");
        key.append(make("kbd", "", `${i + 1}`));
        line.append(key, make("dd", "", `preset “${button.textContent.trim()}”`));
        return line;
      }));
      this.list.showModal();
    }

    /** Whether a key pressed here is meant for the page. */
    heard({ target, key, ctrlKey, altKey, metaKey, isComposing, defaultPrevented }) {
      if (!presenting() || ctrlKey || altKey || metaKey || isComposing || defaultPrevented || this.list.open) return false;
      if (!(target instanceof Element) || target.closest(FIELDS)) return false;
      if (!document.querySelector("#results")?.checkVisibility()) return false;
      const focused = target !== document.body && target !== document.documentElement;
      return !focused || !(key === " " || key.startsWith("Arrow")) || target.matches("[data-switch='stepping']") && key !== " ";
    }

    take(event) {
      if (!this.heard(event)) return;
      const act = event.key === "Escape" ? () => this.close() : this.box.checked && this.action(event);
      if (!act) return;
      event.preventDefault();
      if (!event.repeat || event.key.startsWith("Arrow")) act();
    }

    action({ key }) {
      if (key === "?") return () => this.open();
      const preset = /^[1-9]$/.test(key) && presets()[Number(key) - 1];
      return preset ? () => preset.click() : KEYS[key.length === 1 ? key.toLowerCase() : key];
    }

    /** Close what is open: the rounds, else the settings. */
    close() {
      if (document.querySelector(".step-part:not([hidden])")) tell("pause");
      else tell("fold");
    }
  }

  window.Bass.mountKeys = (element) => new Keys(element);
})();
