/* "Save as a page" and "Save as a picture".
   - A saved page is the shell of ui/recordings/webpage.py with the race in its place. The shell is fetched once, after the
     visitor's first race, so that the button works even if the server has ended since.
   - Without the shell, the race is saved as JSON instead, which plays when it is dropped on the page. */
import { on, number, over, setText } from "bass/page/page.js";
import { run } from "bass/race/run.js";
import { tape } from "bass/race/tape.js";
import { files } from "bass/race/files.js";
import { download } from "bass/race/export.js";
import { card } from "bass/race/card.js";

const PLACE = "%RACE%", BESIDE = ".verdict-more ", SAVED_MS = 2000;

/** Where the run comes from: {about, made}, as in a recording. */
export function origin() {
  const { recorded } = tape.state;
  if (recorded) return { about: recorded.about, made: recorded.made ?? {} };
  const date = new Date().toISOString().slice(0, 10), { name: device, kind, cpu_count } = run().view?.device ?? {};
  const cores = kind === "cpu" ? cpu_count : null;
  const about = [document.querySelector(".about-pair")?.textContent, device, date].filter(Boolean).join("; ");
  return { about, made: { date, by: "Save as a page", device: cores ? `${device}, ${cores} cores` : device, ...files.made } };
}

function save(name, type, content) {
  const blob = new Blob([content], { type });
  download(name, type, blob);
  return `Saved ${name}, ${number(blob.size / 1000, 0)} KB.`;
}

// What the buttons do. A page that is a file has no shell, so it saves no pages.
const takes = { card: async () => save("bass-race.png", "image/png", await card()) };

// The buttons next to the verdict show the answer in their place for a moment.
document.addEventListener("click", async ({ target }) => {
  const button = target.closest(BESIDE + "[data-take]"), take = takes[button?.dataset.take];
  if (!take) return;
  const label = button.textContent;
  button.disabled = true;
  try {
    const said = await take(), took = document.querySelector(".took");
    if (took) setText(took, said);
    setText(button, said.includes(".json") ? "Saved as JSON" : "Saved");
  } finally {
    setTimeout(() => {
      setText(button, label);
      button.disabled = false;
    }, SAVED_MS);
  }
});

export const mountSaving = (element, address) => {
  const took = element.querySelector(".took");
  let shell = null;

  function fetchShell() {
    shell ??= fetch(address).then(async (answer) => {
      const text = await answer.text();
      if (!answer.ok || !text.includes(PLACE)) throw new Error("no shell");
      return text;
    }).catch(() => (shell = null));
    return shell;
  }

  async function savePage() {
    const text = tape.asRecording(origin()), page = await fetchShell();
    if (page) return save("bass-race.html", "text/html", page.replace(PLACE, await files.packed(text)));
    return `${save("bass-race.json", "application/json", text)} The server does not answer, so it is no page: drop it on one to play it.`;
  }

  element.addEventListener("click", async (event) => {
    const take = takes[event.target.closest("[data-take]")?.dataset.take];
    if (take) setText(took, await take());
  });
  takes.page = savePage;
  document.querySelector(BESIDE + "[data-take=page]").hidden = false;
  on("phase", (phase) => over(phase) && !tape.state.recorded && fetchShell());
};
