/* Slows Gradio's timers down. Contract: runs before Gradio's own scripts, which keep the function that requests frames.
   Gradio's timers show tenths of a second but request every frame, and the loading indicator's timer never stops
   (gradio 6.31). They get ten calls a second and no frames; all other requests pass unchanged. */
(() => {
  "use strict";
  const TIMER = /performance\.now\(\)[^;]*\/\s*(1e3|1000)\b/, TENTH_MS = 100;
  const frame = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (callback) => (TIMER.test(callback) ? setTimeout(callback, TENTH_MS) : frame(callback));
})();
