/* Contract: Bass.soon(draw) calls `draw` in a frame soon, once however often it was asked for. All that changes is
   drawn in the same frame, and the longer a frame takes the longer the next one waits: on the machine that runs the
   models too, drawing takes their time. Where nobody sees frames, `draw` is called at once. */
(() => {
  "use strict";
  // Pause after a frame, in multiples of what it took, but never longer than LONGEST_MS: text is to be seen growing.
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
    // The first timer runs once this frame has been laid out and painted.
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
