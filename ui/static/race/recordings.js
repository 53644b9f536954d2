/* The recordings that the page offers, and "Save recording". Contract: a recording is fetched once, beside any race and
   its queue, and played here in the browser; while one is shown, a mark says so. On a page without models (data-replay)
   Run plays the first of them. Texts from files reach the document through textContent alone. */
(() => {
  "use strict";
  const { on, setText, make, run, tape, number } = window.Bass;
  const FAILED = "The recording could not be fetched: try again in a moment.";

  class Recordings {
    constructor(root, offers, server) {
      Object.assign(this, { root, offers, server, fetched: new Map() });
      this.part = root.querySelector(".recordings");
      this.note = root.querySelector(".recording-note");
      this.about = root.querySelector(".recording-about");
      this.back = root.querySelector("[data-back]");
      this.alone = Boolean(document.querySelector("[data-replay]"));
      this.part.hidden = this.alone && offers.length < 2;
      this.buttons = offers.map((offer) => {
        const button = make("button", "action", offer.title);
        Object.assign(button, { type: "button", title: offer.look_for });
        button.dataset.recording = offer.name;
        button.addEventListener("click", () => this.watch(offer));
        return button;
      });
      root.querySelector(".recordings-list").append(...this.buttons);
      this.back.addEventListener("click", () => tape.back());
      for (const kind of ["start", "phase", "instant"]) on(kind, () => this.draw());
      // Gradio's own handler, if there is one, does nothing on such a page.
      if (this.alone) document.addEventListener("click", (event) => event.target.closest("#run") && this.watch(this.chosen));
    }

    get chosen() {
      return this.offers.find(({ name }) => name === tape.state.recorded?.name) ?? this.offers[0];
    }

    get busy() {
      return ["waiting", "running"].includes(this.phase);
    }

    fetch({ name }) {
      if (!this.fetched.has(name)) this.fetched.set(name, this.server.recording(name));
      return this.fetched.get(name);
    }

    /** Play a recording from its start. */
    async watch(offer) {
      this.asked = offer;
      setText(this.about, "");
      try {
        const document = await this.fetch(offer);
        // Another one, or a race, may have been asked for meanwhile.
        if (this.asked !== offer || this.busy) return;
        tape.load(document, offer);
        tape.play();
      } catch {
        this.fetched.delete(offer.name);
        this.note.hidden = false;
        setText(this.about, FAILED);
      }
    }

    draw() {
      this.phase = document.querySelector("#status-line .message")?.dataset.phase;
      const { recorded, own } = tape.state;
      if (this.busy) this.asked = null;
      for (const button of this.buttons) {
        button.disabled = this.busy;
        button.setAttribute("aria-pressed", String(button.dataset.recording === recorded?.name));
      }
      this.part.classList.toggle("small", Boolean(run()));
      this.note.hidden = !recorded;
      this.back.hidden = !own;
      if (recorded) setText(this.about, [recorded.look_for, `Recorded: ${recorded.about}.`].filter(Boolean).join(" "));
    }
  }

  /** The text as a file, packed where the browser can. */
  async function saved(text) {
    const blob = new Blob([text], { type: "application/json" });
    if (!window.CompressionStream) return [blob, "json"];
    const packed = new Response(blob.stream().pipeThrough(new CompressionStream("gzip")));
    return [new Blob([await packed.arrayBuffer()], { type: "application/gzip" }), "json.gz"];
  }

  /** Save the run that is shown; resolves to what was saved, in words. */
  async function saveRecording() {
    const date = new Date().toISOString().slice(0, 10), device = run().view?.device.name;
    const about = [document.querySelector(".about-pair")?.textContent, device, date].filter(Boolean).join("; ");
    const [blob, ending] = await saved(tape.asRecording({ about, made: { date, by: "Save recording" } }));
    const name = `bass-race.${ending}`;
    window.Bass.download(name, blob.type, blob);
    return `Saved ${name}, ${number(blob.size / 1000, 0)} KB: python app.py --replay ${name} plays it.`;
  }

  window.Bass.saveRecording = saveRecording;
  window.Bass.mountTape = (element, props, server) => {
    new Recordings(element.querySelector(".bass-tape"), JSON.parse(props.value || "[]"), server);
  };
})();
