/* Links to what one sees. The address follows the visitor's choices and the playhead, and an address shows them again:
   - replay: the name of a recording; lane, row and round: a round of it, as the inspector counts them;
   - speed: the speed at which it plays; tab: a tab other than the first; scene: a scene of the opening.
   A value that the page cannot show is left out, and one sentence says so. A race of the visitor's own has no such address:
   its settings have one (race/export.js). */
import { on } from "bass/page/page.js";
import { run, roundsIn, laneName } from "bass/race/run.js";
import { tape } from "bass/race/tape.js";
import { files } from "bass/race/files.js";
import { scenes } from "bass/race/recordings.js";
import { inspect } from "bass/race/inspector.js";

const PLACE = ["lane", "row", "round"], SPEEDS = [1, 0.25, 0.1];
// A value in a sentence is cut to LONGEST characters.
const LONGEST = 40, REST_MS = 300;
const STILL = window.matchMedia("(prefers-reduced-motion: reduce)");
const asked = new URLSearchParams(location.search);

/** Change values of the address's query. null removes one. */
export function setQuery(changes) {
  const address = new URL(location.href);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined) address.searchParams.delete(name);
    else address.searchParams.set(name, value);
  }
  if (address.href === location.href) return;
  try {
    history.replaceState(history.state, "", address);
  } catch {
    // Some browsers allow no other address for a file.
  }
}

const quoted = (value) => `“${value.length > LONGEST ? `${value.slice(0, LONGEST)}…` : value}”`;
const listed = (names) => (names.length > 1 ? `${names.slice(0, -1).join(", ")} or ${names.at(-1)}` : `${names}`);
const complaints = [];
const complain = (words) => complaints.push(`The link asks for ${words}`);

/** The recording that the address names, the first one if it only names a round or a speed, or null. */
export function linked(offers) {
  if (asked.has("replay")) return offers.find(({ name }) => name === asked.get("replay").toLowerCase()) ?? null;
  return [...PLACE, "speed"].some((name) => asked.has(name)) ? offers[0] ?? null : null;
}

/** The whole number from 1 to `most` that the address has under this name, or null. */
function numberIn(name, most, words) {
  const text = asked.get(name), value = Number(text);
  if (/^\d{1,9}$/.test(text) && value >= 1 && value <= most) return value;
  complain(`${name} ${quoted(text)}, but ${words} ${most}.`);
  return null;
}

/** The round that the address names, as {lane, row, round}, or null. The whole race must be shown. */
function roundAsked() {
  if (!PLACE.some((name) => asked.has(name))) return null;
  const lanes = [...run().lanes.keys()], lane = asked.get("lane") ?? lanes.at(-1);
  if (!lanes.includes(lane)) {
    complain(`lane ${quoted(lane)}, but this race has ${listed(lanes)}.`);
    return null;
  }
  const { sequences } = run().lanes.get(lane);
  const row = asked.has("row") ? numberIn("row", sequences.length, "this race has rows 1 to") : 1;
  if (row === null) return null;
  const count = roundsIn(sequences[row - 1]).length;
  const round = asked.has("round") ? numberIn("round", count, `row ${row} of ${laneName(lane)} has rounds 1 to`) : 1;
  return round === null ? null : { lane, row, round };
}

/** Show the round that the address names, at the time at which it ended. */
function showRound() {
  tape.live();
  const place = roundAsked();
  if (!place) return false;
  const step = () => roundsIn(run().lanes.get(place.lane).sequences[place.row - 1])[place.round - 1];
  const { record } = step();
  tape.seek(tape.race.lanes.get(place.lane).rounds.find(({ record: { round } }) => round === record.round).end);
  inspect(place.lane, place.row - 1, step());
  return true;
}

/** Resolves once a recording with this name is on the page, to whether no race was started meanwhile. */
const shown = (name) => new Promise((resolve) => {
  on("phase", (phase) => phase === "waiting" && resolve(false));
  on("instant", () => tape.state.recorded?.name === name && resolve(true));
});

/** Show what the address names. */
async function follow(offer, buttons) {
  buttons.find((button) => button.dataset.recording === offer.name).click();
  if (!await shown(offer.name)) return;
  if (asked.has("speed")) {
    const speed = SPEEDS.find((known) => `${known}` === asked.get("speed"));
    if (speed) tape.speed = speed;
    else complain(`speed ${quoted(asked.get("speed"))}, but it can be ${listed(SPEEDS)}.`);
  }
  const place = PLACE.some((name) => asked.has(name));
  if (place && showRound()) return;
  if (STILL.matches) tape.live();
  else if (place) tape.play();
}

/** The tabs of the page, by name. */
const tabs = () => new Map([...document.querySelectorAll("#tabs [role=tab]")].map((tab) => [tab.dataset.tabId, tab]));

function openTab(asked) {
  const known = tabs(), name = asked.toLowerCase();
  if (known.has(name)) known.get(name).click();
  else complain(`tab ${quoted(asked)}, but ${known.size ? `there are ${listed([...known.keys()])}` : "this page has no tabs"}.`);
}

/** Open the sweep over the visitor's own prompts. */
export function askOwnPrompts() {
  openTab("sweep");
  setQuery({ tab: "sweep" });
  // Gradio draws a tab's content when it is first opened.
  const focus = (tries) => {
    const field = document.querySelector("#sweep-prompts textarea");
    if (field?.checkVisibility()) field.focus();
    else if (tries) setTimeout(() => focus(tries - 1), 50);
  };
  focus(40);
}

function openScene() {
  const count = scenes?.names.length ?? 0, scene = count && numberIn("scene", count, "the opening has scenes 1 to");
  if (scene) scenes.show(scene - 1);
  else if (!count) complain("a scene of the opening, but this page does not play it.");
}

/** The round that the playhead has reached, of the row that the inspector shows, or null. */
function reached() {
  const [lane, row] = ["lane", "sequence"].map((name) => document.querySelector(`[data-pick=${name}]`)?.value);
  const round = roundsIn(run()?.lanes.get(lane)?.sequences[row]).length;
  return round ? { lane, row: Number(row) + 1, round } : null;
}

/** Keep the address up to date. */
function bind(offers) {
  const named = () => offers.some(({ name }) => name === tape.state.recorded?.name);
  const replay = () => (offers.length > 1 ? tape.state.recorded.name : null);
  // The address follows a playhead that the visitor moves, once it rests.
  let moved = false, rests = null;
  const forget = () => {
    moved = false;
    clearTimeout(rests);
  };
  const nothing = Object.fromEntries(["replay", ...PLACE, "speed", "scene"].map((name) => [name, null]));
  document.addEventListener("click", ({ target, isTrusted }) => {
    const recording = target.closest("[data-recording]"), tab = target.closest("#tabs [role=tab]");
    const scene = target.closest(".opening-scenes button"), speed = target.closest("[data-speed]");
    if (!isTrusted) return;
    if (scene) setQuery({ ...nothing, scene: [...scene.parentElement.children].indexOf(scene) + 1 });
    if (recording) forget();
    if (recording) setQuery({ ...nothing, replay: offers.length > 1 ? recording.dataset.recording : null });
    if (speed && named()) setQuery({ replay: replay(), speed: speed.dataset.speed });
    if (tab) setQuery({ tab: tab === [...tabs().values()][0] ? null : tab.dataset.tabId });
  });
  on("start", () => named() || setQuery(nothing));
  on("touched", () => (moved = true));
  on("tape", () => (moved = false));
  on("playhead", ({ moving }) => {
    clearTimeout(rests);
    if (!moved || moving || !named()) return;
    rests = setTimeout(() => {
      const place = moved && named() && reached();
      moved = false;
      if (place) setQuery({ replay: replay(), ...place });
    }, REST_MS);
  });
  on("round", ({ lane, row, round }) => {
    moved = false;
    if (named()) setQuery({ replay: replay(), lane, row, round });
  });
  // An opening that plays by itself leaves the address as it is.
  on("scene", (scene) => {
    if (scene === null) setQuery({ scene: null });
    else if (new URLSearchParams(location.search).has("scene")) setQuery({ scene: scene + 1 });
  });
}

export const mountLinks = async (element, { value }) => {
  const { offers } = JSON.parse(value), offer = linked(offers);
  if (asked.has("tab")) openTab(asked.get("tab"));
  if (asked.has("scene")) openScene();
  if (asked.has("replay") && !offer) complain(`the recording ${quoted(asked.get("replay"))}, but this page has ${listed(offers.map(({ name }) => name))}.`);
  bind(offers);
  if (offer) await follow(offer, [...element.querySelectorAll("[data-recording]")]);
  if (complaints.length) files.say(complaints.join(" "));
};
