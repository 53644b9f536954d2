/* The prompt: its length in tokens, and Ctrl+Enter (⌘+Enter on a Mac), which starts the race. The script asks the server
   after a pause in typing, one question at a time. Until the next answer arrives, the line shows the previous one. If the
   server does not answer, the line is empty. */
import { setText } from "bass/page/page.js";

const PAUSE_MS = 300;
const field = () => document.querySelector("#prompt textarea");
const byLine = () => document.querySelector("#prompts input")?.value === "one prompt per line";
/** The question for the server: the text, and whether each of its lines is a prompt. */
const question = () => JSON.stringify([field()?.value ?? "", byLine()]);
let timer = null, ask = null;

/** Ask for the length once the text has not changed for PAUSE_MS. */
export function promptChanged() {
  clearTimeout(timer);
  timer = setTimeout(() => ask?.(), PAUSE_MS);
}

export function mountPromptLength(element, server) {
  const line = element.querySelector(".prompt-length");
  let asking = false, lastQuestion = null;
  const show = ({ text, refused }) => {
    line.classList.toggle("refused", refused);
    setText(line, text);
  };
  ask = async () => {
    const text = question();
    if (asking || text === lastQuestion) return;
    [asking, lastQuestion] = [true, text];
    try {
      show(JSON.parse(await server.prompt_tokens(JSON.parse(text))));
    } catch {
      lastQuestion = null;
      show({ text: "", refused: false });
    }
    asking = false;
    if (lastQuestion !== null && question() !== lastQuestion) promptChanged();
  };
  promptChanged();
}

// Before Gradio hears of it.
document.addEventListener("input", ({ target }) => {
  if (target.closest?.("#prompt")) document.body.dataset.prompt = "edited";
}, true);
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.isComposing) return;
  if (!event.target.closest?.("#settings")) return;
  event.preventDefault();
  document.querySelector("#run:not([disabled])")?.click();
});

