/* The prompt's length in tokens. Contract: asks the server once typing has paused, one question at a time, and shows
   nothing that is not the answer for the text in the field, save while the next answer is on its way. Without the
   server the line is empty. */
(() => {
  "use strict";
  const PAUSE_MS = 300;
  const field = () => document.querySelector("#prompt textarea");
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
      const text = field()?.value ?? "";
      if (asking || text === asked) return;
      [asking, asked] = [true, text];
      try {
        show(JSON.parse(await server.prompt_tokens(text)));
      } catch {
        asked = null;
        show({ text: "", refused: false });
      }
      asking = false;
      if (asked !== null && field()?.value !== asked) promptChanged();
    };
    promptChanged();
  }

  Object.assign(window.Bass, { promptChanged, mountPromptLength });
})();
