/* Contract: runs before Gradio's own scripts, which keep the function that asks for a frame. Gradio's timers show
   tenths of a second but ask for every frame there is, the loading mark's for as long as the page is open (gradio
   6.31: its loop outlives the mark). They get ten calls a second and no frame; everything else is left alone. */
(() => {
  "use strict";
  const TIMER = /performance\.now\(\)[^;]*\/\s*(1e3|1000)\b/, TENTH_MS = 100;
  const frame = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (callback) => (TIMER.test(callback) ? setTimeout(callback, TENTH_MS) : frame(callback));
})();
