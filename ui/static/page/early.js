/* The page while the model is prepared (ui/page/early.py): shows the progress, and reloads once the server has another
   page. */
import { setText } from "bass/page/page.js";

const EVERY_MS = 1000;

/** Gradio's id of the server's current page, or null while there is none. */
async function served() {
  try {
    const answer = await fetch("gradio_api/app_id", { cache: "no-store" });
    return answer.ok ? (await answer.json()).app_id : null;
  } catch {
    return null;
  }
}

export const mountEarly = (element, server) => {
  const bar = element.querySelector("progress"), line = element.querySelector("p");
  const opening = line.textContent;
  // The id that came with this document: the server may have another page already.
  const first = window.gradio_config.app_id;
  const ask = async () => {
    const now = await served();
    if (now && now !== first) return location.reload();
    if (now) {
      try {
        const { words, share } = JSON.parse(await server.preparing());
        setText(line, words ? `${opening} ${words}` : opening);
        if (share === null) bar.removeAttribute("value");
        else bar.value = share;
      } catch {
        // The page with the model is about to open.
      }
    }
    setTimeout(ask, EVERY_MS);
  };
  ask();
};
