/* Contract: while a run is under way and nothing comes of it, asks whether the server is still there, and says so
   on the status line when it is not. Loading the page again is Gradio's, which waits for the server's return. */
(() => {
  "use strict";
  const { on } = window.Bass;
  // Unanswered for so long, a server is as good as gone; a busy one answers between two steps.
  const QUIET_MS = 2000, PATIENCE_MS = 20_000;
  const SENTENCE = "The connection to the server was lost: what came before stays here until the page is loaded again.";
  let timer = null, busy = false;

  /** Whether anybody answers; behind a proxy its 502 to 504 stand for a server that is gone. */
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
    else if (busy) window.Bass.lost(SENTENCE);
  }

  /** Ask once nothing has come for QUIET_MS; every piece of news begins the wait anew. */
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
