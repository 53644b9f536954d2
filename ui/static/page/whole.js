/* Has everything drawn at the end of a race, and before the page is printed. Contract: Bass.whole(draw) calls `draw` then;
   `draw(true)`, before printing, must have drawn everything when it returns. During a race only what is in view is drawn. */
(() => {
  "use strict";
  const { on } = window.Bass;
  const draws = [];

  on("phase", (phase) => {
    // The views that wait for a frame are drawn first.
    if (["done", "error", "stopped"].includes(phase)) setTimeout(() => draws.forEach((draw) => draw(false)));
  });
  window.addEventListener("beforeprint", () => draws.forEach((draw) => draw(true)));

  window.Bass.whole = (draw) => draws.push(draw);
})();
