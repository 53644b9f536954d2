/* A line below Run that compares the form with the lanes. The form contains the settings for the next race. If the lanes
   show a recording or a race with other settings, the line lists them, so that nobody thinks that the lanes were run with
   the form's settings. After a refusal, the lanes still show the last race, and the line says so. Between a click on Run
   and the start of the race, the line is empty. */
import { on, setText, busy } from "bass/page/page.js";
import { run } from "bass/race/run.js";
import { tape } from "bass/race/tape.js";

// The line names up to NAMED differences and counts the others. A prompt is cut to LONGEST characters.
const NAMED = 3, LONGEST = 24;
const PROMPTS = { one: "one prompt for all rows", lines: "one prompt per line" };
// begun: whether the lanes show the race that was requested last.
let form = null, phase = "ready", begun = true, line = null, opening = false;

const plain = (value) => (value === null || value === undefined ? "" : String(value));

function inWords(name, value) {
  const text = plain(value).replace(/\s+/g, " ").trim(), short = text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text;
  if (name === "prompts") return PROMPTS[value] ?? short;
  return name === "prompt" ? `“${short}”` : `${name.replaceAll("_", " ")} ${short || "none"}`;
}

/** Names of the settings in which the race in the lanes differs from the form. */
function different(settings) {
  // With one prompt per line, the number of lines is the batch size; a single line is one prompt for all rows.
  const single = form.prompts === "lines" && plain(form.prompt).trim().split("\n").length === 1;
  const asked = single ? { ...form, prompts: "one" } : form;
  const differs = (name) => name in settings && plain(settings[name]).trim() !== plain(asked[name]).trim();
  return Object.keys(asked).filter((name) => {
    if (name === "batch_size" && asked.prompts === "lines" && settings.prompts === "lines") return false;
    // The line names a prompt that differs, which shows that it is one.
    if (name === "prompts" && settings.prompts === "one" && differs("prompt")) return false;
    return differs(name);
  });
}

/** Whether the lanes show a race from before a refusal. */
const outdated = () => Boolean(run()) && !begun && phase === "error";

function sentence() {
  const settings = run()?.head.settings;
  if (!form || !settings || opening || busy(phase) && !begun) return "";
  const refused = outdated(), names = different(settings);
  const shown = tape.state.recorded ? "a recording" : busy(phase) ? "a race" : "your last race";
  if (!names.length) return refused ? `The lanes still show ${shown}.` : "";
  // The prompt is the longest, so it comes last.
  const sorted = names.sort((a, b) => (a === "prompt") - (b === "prompt")).map((name) => inWords(name, settings[name]));
  const more = sorted.length > NAMED ? ` and ${sorted.length - NAMED} more` : "";
  if (tape.state.recorded && !refused) return `Recorded with ${sorted.slice(0, NAMED).join(", ")}${more}.`;
  return `The lanes ${refused ? "still " : ""}show ${shown} with ${sorted.slice(0, NAMED).join(", ")}${more}. The form is for the next race.`;
}

function draw() {
  setText(line, sentence());
  // page.css marks the lanes.
  document.body.dataset.lanes = outdated() ? "last" : "";
}

export const mountForm = (element) => {
  line = element.querySelector(".of-lanes");
  on("form", (values) => {
    form = values;
    draw();
  });
  on("start", () => {
    begun = true;
    draw();
  });
  on("phase", (now) => {
    if (now === "waiting") begun = false;
    phase = now;
    draw();
  });
  on("instant", draw);
  on("scene", (scene) => {
    opening = scene !== null;
    draw();
  });
};
