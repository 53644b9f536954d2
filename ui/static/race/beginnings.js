/* Shows a text's beginning once its race has ended; during a race its window shows the newest lines. Contract: a class on
   the board and one on each window whose text goes on below; the style sheet does the rest. */
(() => {
  "use strict";
  const { on, soon } = window.Bass;

  window.Bass.mountBeginnings = (element) => {
    const root = element.querySelector(".bass-lanes");
    const mark = () => {
      const ended = root.classList.contains("ended");
      for (const box of root.querySelectorAll(".window")) {
        box.classList.toggle("goes-on", ended && box.scrollHeight > box.clientHeight + 2);
      }
    };
    on("start", () => root.classList.remove("ended"));
    on("phase", (phase) => {
      if (!["done", "error", "stopped"].includes(phase)) return;
      root.classList.add("ended");
      soon(mark);
    });
    new ResizeObserver(() => soon(mark)).observe(root);
  };
})();
