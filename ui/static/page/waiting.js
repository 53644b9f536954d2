/* Says how a race waits: its place in Gradio's queue and the expected time on our status line, "Waiting" in the lanes,
   and a bar while costs are measured. Contract: place and time are Gradio's own (its line "queue: place/length | s/s" is
   read, and hidden once it was understood); a wait that ends without a race leaves the lanes as they were. */
(() => {
  "use strict";
  const { on, setText, number } = window.Bass;
  const LINE = /queue:\s*(\d+)\s*\/\s*(\d+)(?:\s*\|\s*([\d.]+)\s*\/\s*([\d.]+)\s*s)?/;

  /** "about 40 s"; of less than 10 s every second counts. */
  function about(seconds) {
    const rounded = seconds < 10 ? Math.ceil(seconds) : Math.ceil(seconds / 5) * 5;
    return rounded < 120 ? `about ${rounded} s` : `about ${Math.round(rounded / 60)} min`;
  }

  /** What Gradio's line means; "" if it says nothing of a queue. Its time runs to the end of one's own race. */
  function inQueue(text) {
    const [found, place, length, spent, all] = LINE.exec(text) ?? [];
    if (!found) return "";
    const left = Number(all) - Number(spent);
    const when = Number.isFinite(left) && left >= 1 ? ` Going by earlier races, yours ends in ${about(left)}.` : "";
    return `Place ${place} of ${length} in the queue.${when}`;
  }

  /** Shows the place while a race waits. */
  function mountPlace(element, line) {
    let waiting = false;
    const read = () => {
      const own = [...element.querySelectorAll(".progress-text, .meta-text, .meta-text-center")].map((e) => e.textContent).join(" ");
      const words = waiting ? inQueue(own) : "";
      element.classList.toggle("understood", words !== "");
      if (words || !waiting) setText(line, words);
    };
    const watch = new MutationObserver(read);
    on("phase", (phase) => {
      waiting = phase === "waiting";
      watch.disconnect();
      if (waiting) watch.observe(element, { childList: true, subtree: true, characterData: true });
      read();
    });
  }

  /** Shows how far the measurements are. */
  function mountMeasuring(part) {
    const bar = part.querySelector("progress"), words = part.querySelector("span");
    on("measuring", (measuring) => {
      part.hidden = !measuring;
      if (!measuring) return;
      bar.value = measuring.done;
      const left = measuring.left_ms === null ? "" : measuring.left_ms < 500 ? ", almost done" : `, ${about(measuring.left_ms / 1000)} left`;
      setText(words, `${number(100 * measuring.done, 0, " %")}${left}`);
    });
    on("phase", (phase) => phase !== "running" && (part.hidden = true));
  }

  /** "Waiting" in each lane from the click on Run until its race starts, or is found not to start. */
  function mountLanes(root) {
    const before = new Map();
    on("phase", (phase) => {
      if (phase === "waiting") {
        for (const state of root.querySelectorAll(".lane:not([hidden]) .state")) {
          before.set(state, state.textContent);
          setText(state, "Waiting");
        }
      } else if (phase !== "running") {
        for (const [state, text] of before) setText(state, text);
        before.clear();
      }
    });
    on("start", () => before.clear());
  }

  window.Bass.mountWaiting = (element) => {
    mountPlace(element.closest("#status-line"), element.querySelector(".place"));
    mountMeasuring(element.querySelector(".measuring"));
  };
  window.Bass.mountWaitingLanes = mountLanes;
})();
