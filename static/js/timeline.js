// The hops of an order as the server tells them: as a story, and as bars over time.

import { h } from "./dom.js";
import { plural, span, time } from "./format.js";
import { link } from "./parts.js";

/** Waits shorter than this are no part of the story; the bars show them. */
const WORTH_TELLING_MS = 1000;
/** Each kind of hop: what its bar stands for. */
const KINDS = { request: "answered", outbox: "waits to be sent", publish: "goes to the broker", queue: "waits in a queue", handling: "is dealt with", effect: "takes effect" };
/** Waits between one doing and the next. */
const WAITS = ["publish", "queue"];
/** Sent a second time, and why. */
const AGAIN = ["retry", "redrive", "replay"];
const LETTER = /dead letter ([0-9a-f-]{36})/;

function tone(hop) {
  if (hop.kind === "dead_letter" || ["dead", "failed"].includes(hop.state)) return "bad";
  if (["retrying", "waiting", "processing", "pending"].includes(hop.state)) return "warn";
  return "ok";
}

function address(hop) {
  const letter = hop.kind === "dead_letter" && LETTER.exec(hop.text);
  if (letter) return `/dead-letters/${letter[1]}`;
  return hop.event_id && `/inbox?event_id=${hop.event_id}`;
}

function lasted(hop) {
  return hop.until ? Math.max(0, new Date(hop.until) - new Date(hop.at)) : 0;
}

/** What is drawn besides need not be said as well. */
function words(hop) {
  const to = address(hop);
  const said = hop.text.replace(/, and dismissed \d+ duplicates?$/, "").replace(/ \((retry|redrive|replay)\)$/, "");
  return [h("strong", {}, hop.kind === "queue" ? "queue" : hop.who), " ", to ? link(to, said) : said, AGAIN.includes(hop.kind) && [" ", h("span", { class: "tag" }, hop.kind)]];
}

/** Copies that were dismissed, drawn hollow: they came and did nothing. */
function copies(hop) {
  return hop.duplicates > 0 && h("span", { class: "hollow", title: "The inbox knew the event: each copy was acknowledged and changed nothing" }, `${plural(hop.duplicates, "duplicate")}, suppressed`);
}

/** One line for each hop, in words. */
export function story(hops) {
  const told = hops.filter((hop) => !WAITS.includes(hop.kind) || lasted(hop) >= WORTH_TELLING_MS);
  return h("ol", { class: "story" }, told.map((hop) => h("li", { class: tone(hop) },
    h("span", { class: "when" }, time(hop.at)),
    h("div", {}, h("p", {}, words(hop), " ", copies(hop), lasted(hop) >= WORTH_TELLING_MS && h("span", { class: "quiet" }, ` took ${span(lasted(hop))}`)),
      hop.error && h("p", { class: "note" }, hop.error)))));
}

/** The same over time, with every wait. */
export function bars(hops) {
  const from = new Date(hops[0].at).getTime();
  const ends = hops.map((hop) => new Date(hop.until ?? hop.at).getTime());
  const whole = Math.max(1, Math.max(...ends) - from);
  const legend = h("p", { class: "legend" }, Object.entries(KINDS).map(([kind, meaning]) => h("span", {}, h("span", { class: `key ${kind}`, "aria-hidden": "true" }), meaning)),
    h("span", { class: "quiet" }, `${span(whole)} in all`));
  return [legend, h("ol", { class: "bars" }, hops.map((hop) => {
    const start = Math.max(0, new Date(hop.at).getTime() - from);
    const bar = h("span", { class: `span ${KINDS[hop.kind] ? hop.kind : "outbox"} ${tone(hop)}` });
    bar.style.setProperty("--from", `${(100 * start) / whole}%`);
    bar.style.setProperty("--length", `${(100 * lasted(hop)) / whole}%`);
    return h("li", { class: "bar-row" },
      h("span", { class: "bar-name" }, words(hop), " ", copies(hop)),
      h("span", { class: "bar-track", "aria-hidden": "true" }, bar),
      h("span", { class: "bar-time" }, `+${span(start)}`, lasted(hop) >= 1 && h("span", { class: "quiet" }, ` for ${span(lasted(hop))}`)));
  }))];
}
