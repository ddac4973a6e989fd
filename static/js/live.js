// The live picture: one stream while the page is looked at, none while it is hidden or paused.
//
// The server sends the whole picture first and what changed from then on, so a stream that broke is simply opened
// again. Where streams do not get through, the picture is asked for every few seconds instead.

import { logIn } from "./api.js";

const POLL_MS = 5000;
/** A stream that has not said anything by then is taken for one that does not get through. */
const PATIENCE_MS = 8000;
/** Pages are drawn without a picture if there is none by then, neither by a stream nor by asking. */
const FIRST_PICTURE_MS = PATIENCE_MS + 2000;
const POINTS = 60;

export const picture = {};
/** Depth by queue, once a second for the last minute. */
export const history = new Map();
/** "connecting", "live", "polling", "paused", "hidden" or "away" */
export let state = "connecting";

let paused = localStorage.getItem("stockade.paused") === "yes";
let source = null;
let timer = null;
let lastFrameAt = 0;
const listeners = new Set();

/** Calls back on each frame with the names of the sections in it, and with none when only the state changed. */
export function watch(listener, signal) {
  listeners.add(listener);
  signal?.addEventListener("abort", () => listeners.delete(listener));
}

export function isPaused() {
  return paused;
}

/** Does the picture follow what happens? */
export function isLive() {
  return ["live", "polling"].includes(state);
}

export function setPaused(value) {
  paused = value;
  localStorage.setItem("stockade.paused", value ? "yes" : "no");
  restart();
}

/** Begins to watch; done when there is a picture, or none is to be expected soon. */
export function start() {
  document.addEventListener("visibilitychange", restart);
  restart();
  setInterval(remember, 1000);
  return new Promise((resolve) => {
    if (state !== "connecting") resolve();
    watch(resolve);
    setTimeout(resolve, FIRST_PICTURE_MS);
  });
}

function restart() {
  stop();
  if (paused) return become("paused");
  if (document.hidden) return become("hidden");
  become("connecting");
  open();
}

function stop() {
  source?.close();
  source = null;
  clearTimeout(timer);
}

function open() {
  source = new EventSource("/v1/events");
  for (const kind of ["snapshot", "delta"]) {
    source.addEventListener(kind, (event) => {
      clearTimeout(timer);
      become("live");
      take(JSON.parse(event.data));
    });
  }
  source.addEventListener("error", () => {
    become("away");
    // The browser opens it again by itself, unless the server said no.
    if (source.readyState === EventSource.CLOSED) poll();
  });
  timer = setTimeout(poll, PATIENCE_MS);
}

async function poll() {
  stop();
  try {
    const response = await fetch("/v1/events?once=true");
    if (response.status === 401) logIn();
    const text = response.ok ? await response.text() : "";
    const data = text.split("\n").find((line) => line.startsWith("data:"));
    if (!data) throw new Error("no picture");
    become("polling");
    take(JSON.parse(data.slice(5)));
  } catch {
    become("away");
  }
  // A server that is back may stream again.
  timer = setTimeout(() => (state === "away" ? restart() : poll()), POLL_MS);
}

function take(sections) {
  Object.assign(picture, sections);
  lastFrameAt = Date.now();
  tell(Object.keys(sections));
}

function become(next) {
  if (state === next) return;
  state = next;
  tell([]);
}

function tell(names) {
  for (const listener of [...listeners]) listener(names);
}

/** Keeps a minute of depths for the sparklines. */
function remember() {
  if (!picture.queues || !isLive()) return;
  for (const queue of picture.queues) {
    const points = history.get(queue.name) ?? [];
    points.push(queue.depth + (queue.in_flight ?? 0));
    if (points.length > POINTS) points.shift();
    history.set(queue.name, points);
  }
  tell(["history"]);
}

/** How old the picture is, if it should be newer. */
export function staleFor() {
  return isLive() || !lastFrameAt ? 0 : Date.now() - lastFrameAt;
}

/** "inventory" of "stockade.inventory": the name of the consumer. */
export function shortName(queue) {
  return queue.name.slice(queue.name.lastIndexOf(".") + 1);
}

/** The consumers there are, as far as the picture tells, and the one asked for. */
export function consumers(asked) {
  const names = picture.queues?.map(shortName) ?? Object.keys(picture.server?.consumers ?? {}).filter((name) => name !== "dead-letters");
  return asked && !names.includes(asked) ? [...names, asked] : names;
}
