/* Draws in frames. Contract: Bass.soon(draw) calls `draw` once in a coming frame, however often it was asked for; in a
   hidden page, at once. All changes are drawn in the same frame. The longer a frame takes, the longer the next one
   waits, since on the machine that also runs the models, drawing takes time from them. */
(() => {
  "use strict";
  // The pause after a frame: BUSY times its duration, at most LONGEST_MS, so that text is seen to grow.
  const BUSY = 4, LONGEST_MS = 120;
  const wanted = new Set();
  let waiting = false;

  function drawAll() {
    const draws = [...wanted];
    wanted.clear();
    for (const draw of draws) draw();
  }

  function frame(start) {
    drawAll();
    // The first timer runs after this frame's layout and paint.
    setTimeout(() => setTimeout(() => {
      waiting = false;
      if (wanted.size) request();
    }, Math.min(LONGEST_MS, BUSY * (performance.now() - start))));
  }

  function request() {
    waiting = true;
    requestAnimationFrame(frame);
  }

  document.addEventListener("visibilitychange", () => document.hidden && drawAll());

  window.Bass.soon = (draw) => {
    wanted.add(draw);
    if (document.hidden) drawAll();
    else if (!waiting) request();
  };
})();
