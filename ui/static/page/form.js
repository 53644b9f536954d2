/* What the form and the lanes have to do with each other. Contract: the form is what Run would send; where the lanes show a
   recording, or a race, with other settings, a line below Run says which, so that the form does not seem to be theirs.
   After a refusal, which leaves the last race in the lanes, it says so too. Until a race that was asked for is shown it
   is empty. */
(() => {
  "use strict";
  const { on, run, setText, busy, tape } = window.Bass;
  // Differences that are named; more are only counted.
  const NAMED = 3, LONGEST = 40;
  // begun: whether the lanes show what was asked for last.
  let form = null, phase = "ready", begun = true, line = null;

  const plain = (value) => (value === null || value === undefined ? "" : String(value));

  function inWords(name, value) {
    const text = plain(value).replace(/\s+/g, " ").trim(), short = text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text;
    return `${name.replaceAll("_", " ")} ${name === "prompt" ? `“${short}”` : short || "none"}`;
  }

  /** The settings of the race in the lanes that are others than the form's. */
  function different(settings) {
    return Object.keys(form).filter((name) => {
      // With a prompt a line, the lines are the batch.
      if (name === "batch_size" && form.prompts === "lines" && settings.prompts === "lines") return false;
      return name in settings && plain(settings[name]).trim() !== plain(form[name]).trim();
    });
  }

  /** Whether the lanes show a race from before a refusal. */
  const outlived = () => Boolean(run()) && !begun && phase === "error";

  function said() {
    const settings = run()?.head.settings;
    if (!form || !settings || busy(phase) && !begun) return "";
    const refused = outlived(), names = different(settings);
    const what = tape.state.recorded ? "a recording" : busy(phase) ? "a race" : "your last race";
    if (!names.length) return refused ? `The lanes still show ${what}.` : "";
    // The prompt is the longest and comes last.
    const sorted = names.sort((a, b) => (a === "prompt") - (b === "prompt")).map((name) => inWords(name, settings[name]));
    const more = sorted.length > NAMED ? ` and ${sorted.length - NAMED} more` : "";
    return `The lanes ${refused ? "still " : ""}show ${what} with ${sorted.slice(0, NAMED).join(", ")}${more}; these settings are for the next one.`;
  }

  function draw() {
    setText(line, said());
    // For page.css, which says it at the lanes.
    document.body.dataset.lanes = outlived() ? "last" : "";
  }

  window.Bass.mountForm = (element) => {
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
  };
})();
