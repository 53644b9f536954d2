/* Notices a lost server. Contract: while a run sends nothing, asks whether the server still answers, and says on the
   status line when it does not. Gradio reloads the page when the server is back. */
(() => {
  "use strict";
  const { on } = window.Bass;
  // Ask after QUIET_MS without news; give up after PATIENCE_MS: a busy server answers between two steps.
  const QUIET_MS = 2000, PATIENCE_MS = 20_000;
  const SENTENCE = "The connection to the server was lost. What was shown before stays here until the page is reloaded.";
  let timer = null, busy = false;

  /** Whether the server answers; a proxy in front of a lost server answers with 502 to 504. */
  async function answers() {
    try {
      const options = { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) };
      return (await fetch("gradio_api/app_id", options)).status < 500;
    } catch {
      return false;
    }
  }

  async function ask() {
    if (await answers()) wait();
    else if (busy) {
      window.Bass.cutOff();
      window.Bass.lost(SENTENCE);
    }
  }

  /** Ask once nothing has come for QUIET_MS; each new line restarts the wait. */
  function wait() {
    clearTimeout(timer);
    timer = busy ? setTimeout(ask, QUIET_MS) : null;
  }

  on("line", wait);
  on("phase", (phase) => {
    busy = phase === "waiting" || phase === "running";
    wait();
  });
})();
