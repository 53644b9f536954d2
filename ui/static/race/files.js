/* Recorded races in files: packs them, reads them, and plays a file that is dropped on the page or chosen.
   - A file is a page saved by save.js or ui/recordings/webpage.py, or a recording as JSON, plain or compressed with gzip.
   - In a page, the race is the text of the element #race: JSON, compressed with gzip, in base64. So no text of a model can
     end the element. A page that is opened here is only parsed, never run.
   - A file that cannot be played changes nothing but the message. */
import { on, tell, make, busy } from "bass/page/page.js";
import { tape } from "bass/race/tape.js";
import { damaged } from "bass/race/check.js";

const ID = "race";
let phase = "ready";

/** Send bytes through a compressing or decompressing stream. */
const through = (bytes, stream) => new Response(new Blob([bytes]).stream().pipeThrough(stream));

/** The text as gzip in base64. */
async function packed(text) {
  const blob = await through(text, new CompressionStream("gzip")).blob();
  const reader = new FileReader();
  const loaded = new Promise((resolve, reject) => Object.assign(reader, { onload: resolve, onerror: reject }));
  reader.readAsDataURL(blob);
  await loaded;
  return reader.result.split(",")[1];
}

const unzipped = (bytes) => through(bytes, new DecompressionStream("gzip")).text();
const unpacked = (text) => unzipped(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)));

/** The recording with what this version of the page adds to its head. */
function completed({ head, ...document }) {
  const { looks, keywords, reference } = files.known;
  return { ...document, head: { pair: {}, ...head, looks, keywords, reference } };
}

/** The recording in a saved page, or the one with this name in a page with several. */
const embedded = async (page, name) =>
  completed(JSON.parse(await unpacked((page.getElementById(`${ID}-${name}`) ?? page.getElementById(ID)).textContent)));

const starts = (bytes, ...values) => values.every((value, i) => bytes[i] === value);

/** The recording in a file. Throws an Error whose message is a sentence for the visitor. */
async function read(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const no = `${file.name} is not a recorded race`;
  if (starts(bytes, 0xfd, 0x37, 0x7a, 0x58, 0x5a)) {
    throw new Error(`${file.name} is compressed with xz, which browsers cannot read: play it with python app.py --replay.`);
  }
  let document = null;
  try {
    const text = starts(bytes, 0x1f, 0x8b) ? await unzipped(bytes) : new TextDecoder().decode(bytes);
    if (/^\s*<!doctype html/i.test(text)) document = await embedded(new DOMParser().parseFromString(text, "text/html"));
    else document = completed(JSON.parse(text));
  } catch {
    throw new Error(`${no}: choose a file that “Save as a page” wrote.`);
  }
  if (document.recording !== files.known.format) throw new Error(`${no} of format ${files.known.format}, which this page plays.`);
  const part = damaged(document);
  if (part) throw new Error(`${no}: ${part} cannot be drawn.`);
  return document;
}

/** Play a file, or say in one sentence why not. */
async function open(file) {
  if (busy(phase)) return say(`A race is running: press Stop, then open ${file.name} again.`);
  try {
    const document = await read(file);
    say("");
    tell("touched");
    const about = document.about || "on an unnamed machine";
    tape.load({ ...document, about }, { name: `file ${file.name}`, look_for: `${file.name}.` });
    tape.play();
    if (window.matchMedia("(prefers-reduced-motion: reduce)").matches) tape.live();
  } catch (error) {
    say(error.message);
  }
}

// known, made: what the page tells about this version (ui/recordings/viewer.py).
export const files = { known: null, made: null, packed, embedded, say };
const line = make("p", "tape-message");
line.setAttribute("role", "alert");

/** Show a sentence above the verdict until the next race or recording. */
function say(words) {
  line.remove();
  line.textContent = words;
  if (words) document.querySelector(".bass-lanes").prepend(line);
}

function bindDrops() {
  const { classList } = document.body;
  const carriesFile = (event) => event.dataTransfer?.types.includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!carriesFile(event)) return;
    event.preventDefault();
    classList.add("dropping");
  });
  document.addEventListener("dragleave", (event) => event.relatedTarget || classList.remove("dropping"));
  document.addEventListener("drop", (event) => {
    classList.remove("dropping");
    if (!carriesFile(event)) return;
    event.preventDefault();
    open(event.dataTransfer.files[0]);
  });
}

export const mountFiles = (element) => {
  on("phase", (now) => {
    phase = now;
    if (now === "waiting") say("");
  });
  element.querySelector("input[type=file]").addEventListener("change", ({ target }) => {
    if (target.files.length) open(target.files[0]);
    target.value = "";
  });
  bindDrops();
};

