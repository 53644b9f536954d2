/* Has everything drawn at the end of a race. Contract: Bass.whole(draw) calls `draw` then. During a race only what is in
   view is drawn; before a print, lecture/print.js has everything drawn. */
(() => {
  "use strict";
  const { on } = window.Bass;
  const draws = [];

  on("phase", (phase) => {
    // The views that wait for a frame are drawn first.
    if (["done", "error", "stopped"].includes(phase)) setTimeout(() => draws.forEach((draw) => draw()));
  });

  window.Bass.whole = (draw) => draws.push(draw);
})();
