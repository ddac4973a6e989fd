// The hops of an order, as a story and as bars: from the server's timeline where it has one, else put together from
// its outbox and inbox.

import { h } from "./dom.js";
import { plural, span, time } from "./format.js";
import { link } from "./parts.js";

/** A hop: {at, until, who, what, tone, href, note}. */
export function hopsOf(order, { timeline, sent, seen, notices }) {
  const hops = timeline ? fromServer(timeline) : assembled(order, sent, seen, notices);
  return hops.filter((hop) => hop.at).sort((a, b) => new Date(a.at) - new Date(b.at));
}

function fromServer(timeline) {
  const known = timeline.hops ?? timeline.data ?? timeline.entries ?? [];
  return known.map((hop) => ({
    at: hop.at ?? hop.started_at ?? hop.created_at,
    until: hop.until ?? hop.finished_at ?? null,
    who: hop.who ?? hop.consumer ?? hop.module ?? hop.kind ?? "",
    what: hop.text ?? hop.what ?? hop.words ?? hop.kind ?? "",
    note: hop.error ?? hop.last_error ?? null,
    tone: hop.error || hop.state === "dead" ? "bad" : hop.state === "retrying" ? "warn" : "ok",
    repeats: hop.duplicates ?? 0,
    href: hop.event_id ? `/inbox?event_id=${encodeURIComponent(hop.event_id)}` : null,
  }));
}

function assembled(order, sent, seen, notices) {
  const hops = [{ at: order.created_at, who: "api", what: `took the order and committed it as ${order.number}`, tone: "ok" }];
  const DID = { processed: "dealt with", retrying: "will try again", waiting: "keeps for later", dead: "gave up on", processing: "is at work on" };
  // Cause before effect, also where both happened within the same millisecond.
  const inOrder = [...sent].sort((a, b) => a.id.localeCompare(b.id));
  for (const event of inOrder) {
    hops.push({
      at: event.created_at,
      until: event.published_at,
      who: "outbox",
      what: event.target ? `${event.event_type} goes to ${event.target} again` : `${event.event_type} ${event.published_at ? "was sent" : "waits to be sent"}`,
      note: event.last_error,
      tone: event.status === "dead" ? "bad" : event.published_at ? "ok" : "warn",
      href: `/inbox?event_id=${event.id}`,
    });
    for (const row of seen.filter((known) => known.event_id === event.id)) {
      const tries = row.attempts > 1 ? `, at attempt ${row.attempts}` : "";
      hops.push({
        at: row.started_at,
        until: row.finished_at,
        who: row.consumer,
        what: `${DID[row.state] ?? row.state} ${row.event_type}${tries}`,
        note: row.last_error,
        tone: { processed: "ok", dead: "bad" }[row.state] ?? "warn",
        repeats: row.duplicates,
        href: `/inbox?event_id=${row.event_id}`,
      });
    }
  }
  for (const notice of notices) {
    hops.push({ at: notice.created_at, who: "notifications", what: `told the customer: ${notice.kind}`, tone: "ok" });
  }
  return hops;
}

function repeats(hop) {
  return hop.repeats > 0 && h("span", { class: "hollow" }, `${plural(hop.repeats, "duplicate")}, suppressed`);
}

/** One line for each hop, in words. */
export function story(hops) {
  if (!hops.length) return h("p", { class: "quiet" }, "Nothing has happened yet.");
  return h("ol", { class: "story" }, hops.map((hop) => h("li", { class: hop.tone },
    h("span", { class: "when" }, time(hop.at)), " ",
    h("strong", {}, hop.who), " ", hop.href ? link(hop.href, hop.what) : hop.what, " ", repeats(hop),
    hop.note && h("p", { class: "note" }, hop.note))));
}

/** The same over time. */
export function bars(hops) {
  if (!hops.length) return h("p", { class: "quiet" }, "Nothing has happened yet.");
  const from = new Date(hops[0].at).getTime();
  const ends = hops.map((hop) => new Date(hop.until ?? hop.at).getTime());
  const whole = Math.max(1, Math.max(...ends) - from);
  return h("div", { class: "bars" }, hops.map((hop, index) => {
    const start = new Date(hop.at).getTime() - from;
    const length = Math.max(0, ends[index] - from - start);
    const bar = h("span", { class: `span ${hop.tone}` });
    bar.style.setProperty("--from", `${(100 * start) / whole}%`);
    bar.style.setProperty("--length", `${(100 * length) / whole}%`);
    return h("div", { class: "bar-row" },
      h("span", { class: "bar-name" }, h("strong", {}, hop.who), " ", hop.what, " ", repeats(hop)),
      h("span", { class: "bar-track", "aria-hidden": "true" }, bar),
      h("span", { class: "bar-time" }, `+${span(start)}`, length >= 1 ? `, ${span(length)}` : ""));
  }));
}

