/* The prompt: its length in tokens, and Ctrl+Enter (on a Mac ⌘+Enter), which starts the race. Contract: asks the server once typing has paused, one question at a time, and shows
   nothing that is not the answer for the text in the field, save while the next answer is on its way. Without the
   server the line is empty. */
(() => {
  "use strict";
  const PAUSE_MS = 300;
  const field = () => document.querySelector("#prompt textarea");
  const byLine = () => document.querySelector("#prompts input")?.value === "one prompt per line";
  /** What a question is about: the text, and whether each of its lines is a prompt. */
  const question = () => JSON.stringify([field()?.value ?? "", byLine()]);
  let timer = null, ask = null;

  /** Ask once the text has not changed for a while. */
  function promptChanged() {
    clearTimeout(timer);
    timer = setTimeout(() => ask?.(), PAUSE_MS);
  }

  function mountPromptLength(element, server) {
    const line = element.querySelector(".prompt-length");
    let asking = false, asked = null;
    const show = ({ text, refused }) => {
      line.classList.toggle("refused", refused);
      window.Bass.setText(line, text);
    };
    ask = async () => {
      const text = question();
      if (asking || text === asked) return;
      [asking, asked] = [true, text];
      try {
        show(JSON.parse(await server.prompt_tokens(JSON.parse(text))));
      } catch {
        asked = null;
        show({ text: "", refused: false });
      }
      asking = false;
      if (asked !== null && question() !== asked) promptChanged();
    };
    promptChanged();
  }

  document.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.isComposing) return;
    if (!event.target.closest?.("#settings")) return;
    event.preventDefault();
    document.querySelector("#run:not([disabled])")?.click();
  });

  Object.assign(window.Bass, { promptChanged, mountPromptLength });
})();
