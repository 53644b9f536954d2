/* Draws the opening ahead of Gradio: header, lanes and recordings are shown on a stage in front of Gradio's page,
   which is hidden until it has mounted. Then the stage's parts move into it, and go on playing.
   - The document has the parts' templates (Gradio's config) and the first recording (ui/page/ahead.py). Other recordings
     come from Gradio's server, once it can be asked.
   - The event adopted follows when the parts have moved.
   - There is no stage from 701 to 900 px, where the form comes first, with reduced motion, or if the address asks for something other than the opening. */
import { tell, make, setText } from "bass/page/page.js";
import { linked } from "bass/page/links.js";
import { openingScenes } from "bass/race/opening.js";

const OTHERS = ["tab", "scene", "present"], LONGEST_MS = 5000, LATE_MS = 20000;
const LATE = "The rest of the page has not loaded yet: reload the page if it doesn't come.";
const media = (query) => window.matchMedia(query).matches;
let stage = null;

function playsOpening(offers, first) {
  const asked = new URLSearchParams(location.search), names = openingScenes.map(({ name }) => name);
  return asked.get("play") !== "off" && !linked(offers) && !OTHERS.some((name) => asked.has(name))
    && !media("(prefers-reduced-motion: reduce)") && media("(min-width: 901px), (max-width: 700px)")
    && names[0] === first && names.every((name) => offers.some((offer) => offer.name === name));
}

/** Set the theme as Gradio will. */
function setTheme() {
  const asked = new URLSearchParams(location.search).get("__theme");
  document.body.classList.toggle("dark", asked === "dark" || (asked !== "light" && media("(prefers-color-scheme: dark)")));
}

/** The header as Gradio will show it. Presenter mode needs the settings. */
function header({ html_template: template, value }) {
  const element = make("div");
  element.innerHTML = template;
  setText(element.querySelector(".about-pair"), value ?? "");
  element.querySelector("[data-present]").removeAttribute("data-present");
  return element;
}

/** Build the stage. `mounts` has a function for each of its parts, which mounts it. */
export function raise(mounts) {
  const { header: head, parts, tabs, name, recording, replay } = JSON.parse(document.getElementById("ahead").textContent);
  const known = new Map((window.gradio_config.components ?? []).map(({ id, props }) => [id, props]));
  const props = Object.fromEntries(Object.entries(parts).map(([part, id]) => [part, known.get(id)]));
  if (!props.tape || !playsOpening(JSON.parse(props.tape.value).offers, name)) return;
  setTheme();
  let resolve = null;
  const later = new Promise((go) => (resolve = go));
  const server = { recording: async (asked) => (asked === name ? recording : (await later)(asked)) };
  const root = make("div", "ahead"), workspace = make("div", "ahead-workspace"), results = make("div", "ahead-results"), tablist = make("div", "ahead-tabs");
  tablist.append(...tabs.map((tab) => make("span", "", tab)));
  root.toggleAttribute("data-replay", replay);
  root.append(make("style", "", window.gradio_config.css), header(known.get(head)), tablist, workspace);
  workspace.append(make("div"), results);
  const elements = new Map();
  stage = { root, resolve, waiting: new Map(), elements };
  for (const part of Object.keys(mounts)) {
    const element = make("div", "adopted");
    element.innerHTML = props[part].html_template;
    // Let Gradio draw an empty part, which ours replaces.
    props[part].html_template = "<div></div>";
    elements.set(part, element);
    results.append(element);
  }
  // From the first frame on, because the layout depends on it.
  root.querySelector(".opening").hidden = false;
  document.body.prepend(root);
  // Once the parser has reached it.
  setTimeout(() => stage?.root === root && document.querySelector("gradio-app")?.toggleAttribute("inert", true));
  // Mount each part in a separate task, so that no task is long.
  for (const [part, mount] of Object.entries(mounts)) setTimeout(() => mount(elements.get(part), props[part], server));
  setTimeout(() => {
    if (stage?.root !== root) return;
    const late = make("p", "ahead-late", LATE);
    late.setAttribute("role", "alert");
    root.prepend(late);
  }, LATE_MS);
}

/** Let a part of the stage move into Gradio's element, once all can. Returns whether there is such a part. */
export function adopt(part, place, server) {
  if (!stage?.elements.has(part)) return false;
  stage.waiting.set(part, place);
  // Gradio's own copy of the part.
  place.replaceChildren();
  // Wrap the server in a function: it answers to every method name, also `then`, so a promise would wait for it.
  if (server) stage.resolve((name) => server.recording(name));
  if (stage.waiting.size === stage.elements.size) lowerSoon(performance.now());
  return true;
}

/** Move the parts once Gradio has drawn the form. */
function lowerSoon(since) {
  const drawn = document.querySelector("#run")?.getClientRects().length;
  if (!drawn && performance.now() - since < LONGEST_MS) return void setTimeout(() => lowerSoon(since), 50);
  const { root, waiting, elements } = stage;
  stage = null;
  for (const [part, place] of waiting) {
    const element = elements.get(part);
    // moveBefore keeps the animations; not every browser has it.
    if (place.moveBefore && place.isConnected) place.moveBefore(element, null);
    else place.append(element);
  }
  root.remove();
  document.querySelector("gradio-app").removeAttribute("inert");
  tell("adopted", true);
}

