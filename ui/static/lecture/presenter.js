/* Presenter mode: larger type, and the settings folded into one line.
   - ?present=1 in the address turns it on. The switch in the page's head turns it on and off and changes the address, but
     nothing of the run. The mode is a class on the body, which makes plots redraw.
   - The line shows the settings that Run would send, or those of the running race.
   - A key works only in presenter mode, while keys are on (keys=off in the address turns them off, WCAG 2.1.4) and the race
     is in sight, without Ctrl, Alt or Meta, and never in an input field. Space goes to the focused element, and so do the arrow keys,
     unless it is a button.
   - Before printing, the page gets the paper's width, light colours and the normal font size, and every chart is drawn at
     that width, even out of view. Afterwards everything is restored. This covers the Print buttons, the browser's own
     command and PDFs. All settings of the run are printed on top, because the form shows only some of them. */
import { on, number, setText, make, busy, overlaid } from "bass/page/page.js";
import { run } from "bass/race/run.js";
import { setQuery } from "bass/page/links.js";
import { plots } from "bass/page/plots.js";

const CLASS = "presenting";
let words = {};

const query = (name) => new URLSearchParams(location.search).get(name);
const presenting = () => document.body.classList.contains(CLASS);

/** The line as [prompt, the rest]. For a recording without settings, it is the page's description. */
function inWords({ prompt = "", prompts, batch_size: batch, temperature, max_new_tokens: tokens, draft_length: length }) {
  const rows = prompts === "lines" ? prompt.split("\n").filter((line) => line.trim()).length : batch;
  if (!prompt) return [document.querySelector(".about-pair")?.textContent || "Settings", ""];
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
      // After a pointer click, Space should pause the page, not press this line again.
      if (event.detail > 0) this.line.blur();
    });
    document.addEventListener("bass:fold", () => this.open(false));
    this.form = null;
    this.racing = false;
    on("form", (form) => this.show({ form }));
    on("phase", (phase) => this.show({ racing: busy(phase) }));
    on("start", () => this.show({}));
    if (query("present") === "1") this.set(true);
  }

  get opened() {
    return document.body.dataset.settings === "open";
  }

  /** Turn the mode on or off. The run is not affected. */
  set(presented) {
    document.body.classList.toggle(CLASS, presented);
    setQuery({ present: presented ? "1" : null });
    setText(this.button, presented ? "Leave presenter mode" : "Presenter mode");
    this.open(false);
  }

  open(opened) {
    if (!opened && document.activeElement?.closest("#settings") && presenting()) this.line.focus();
    document.body.dataset.settings = opened ? "open" : "folded";
    this.line.setAttribute("aria-expanded", String(opened));
  }

  show(changes) {
    Object.assign(this, changes);
    const shown = run()?.head.settings, next = this.form && inWords(this.form), now = shown && inWords(shown);
    const other = next && now && String(next) !== String(now);
    const [prompt, rest] = (this.racing && now) || next || now || inWords({});
    setText(this.line.querySelector(".present-prompt"), `${other && !this.racing ? "Next: " : ""}${prompt}`);
    setText(this.line.querySelector(".present-rest"), rest);
  }
}

const FIELDS = "input, textarea, select, [contenteditable]:not([contenteditable='false']), [role='textbox']";
const announce = (name) => document.dispatchEvent(new CustomEvent(`bass:${name}`));
const press = (selector) => document.querySelector(selector)?.click();
const presets = () => [...document.querySelectorAll("#presets button:not(#more-presets)")].slice(0, 9);

const KEYS = {
  r: () => press("#run"), s: () => press("#stop"), " ": () => announce("pause"), ArrowRight: () => announce("step"), ArrowLeft: () => announce("back"),
};

class Keys {
  constructor(element) {
    this.list = element.querySelector("dialog.keys");
    this.box = element.querySelector("[data-keys-on]");
    this.box.checked = query("keys") !== "off";
    this.box.addEventListener("change", () => setQuery({ keys: this.box.checked ? null : "off" }));
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

  /** Whether this key event is for presenter mode. */
  heard({ target, key, ctrlKey, altKey, metaKey, isComposing, defaultPrevented }) {
    if (!presenting() || ctrlKey || altKey || metaKey || isComposing || defaultPrevented || this.list.open) return false;
    if (!(target instanceof Element) || target.closest(FIELDS)) return false;
    if (!document.querySelector("#results")?.checkVisibility()) return false;
    const focused = target !== document.body && target !== document.documentElement;
    // A focused button uses Space itself, and other focused elements the arrow keys too. The question "Bet first" is
    // about the next race, so its buttons do not step through the last one.
    return !focused || (key.startsWith("Arrow") ? target.matches("button:not([role])") && !target.closest(".bet") : key !== " ");
  }

  take(event) {
    if (!this.heard(event)) return;
    const act = event.key === "Escape" ? !overlaid() && (() => this.close()) : this.box.checked && this.action(event);
    if (!act) return;
    event.preventDefault();
    if (!event.repeat || event.key.startsWith("Arrow")) act();
  }

  action({ key }) {
    if (key === "?") return () => this.open();
    const preset = /^[1-9]$/.test(key) && presets()[Number(key) - 1];
    return preset ? () => preset.click() : KEYS[key.length === 1 ? key.toLowerCase() : key];
  }

  /** Close the step-by-step view if it is open, else the settings. */
  close() {
    if (document.querySelector(".step-part:not([hidden])")) announce("pause");
    else announce("fold");
  }
}

const THEMES = ["dark", "presenting"];
let before = null;

/** The settings of the run on the page, as elements with name and value. Empty ones are left out. */
function listed() {
  const settings = Object.entries(run()?.head.settings ?? {}).filter(([, value]) => value !== null && value !== "");
  return [...settings, ["printed", new Date().toLocaleString("en")]].map(([name, value]) => {
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

export const mountPresenter = (element) => {
  new Presenter(element);
  new Keys(element);
  const list = element.querySelector(".print-settings");
  window.addEventListener("beforeprint", () => prepare(list));
  window.addEventListener("afterprint", () => restore(list));
  // Load Plotly first, because the browser does not wait for anything that beforeprint starts.
  const print = () => plots.load().catch(() => {}).then(() => window.print());
  document.addEventListener("click", (event) => event.target.closest("[data-print]") && print());
  document.addEventListener("keydown", (event) => {
    if (event.key !== "p" || !(event.ctrlKey || event.metaKey) || event.shiftKey || event.altKey || window.Plotly) return;
    event.preventDefault();
    print();
  });
};
