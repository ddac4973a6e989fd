// Queues and consumers: how full, how old, and whether at rest.

import { path, post } from "../api.js";
import { h, isPressed, redraw } from "../dom.js";
import { count, span } from "../format.js";
import * as live from "../live.js";
import { act, badge, card, link, sparkline, table } from "../parts.js";
import * as session from "../session.js";

export default {
  title: "Queues",
  forPlatform: true,
  draw({ query, signal }) {
    const asked = query.get("consumer");
    const body = h("div", {}, h("p", { class: "quiet" }, "Looking…"));
    const others = h("div", {});
    const update = (names) => {
      const { queues, server, inbox = [] } = live.picture;
      if (!queues || !server || (names.length === 1 && names[0] === "history")) return;
      if (isPressed()) return;
      const shown = queues.filter((queue) => !asked || live.shortName(queue) === asked);
      redraw(body, shown.length ? drawQueues(shown, inbox, server) : h("p", { class: "quiet" }, `There is no queue of ${asked}.`), asked && h("p", { class: "more" }, link("/queues", "All queues")));
      redraw(others, drawLoops(server, queues.map(live.shortName)));
    };
    live.watch(update, signal);
    update([]);
    return [
      h("h1", {}, "Queues and consumers"),
      h("p", { class: "lead" }, "Pausing finishes the batch in hand, holds for every instance and survives a restart. Orders are taken all the same; they wait in the queue."),
      card("Queues", {}, body),
      card("Beside the queues", {}, others),
    ];
  },
};

function drawQueues(queues, inbox, server) {
  const tally = (queue) => inbox.find((row) => row.consumer === live.shortName(queue)) ?? {};
  return table("Queues", [
    { head: "Queue", cell: (queue) => h("strong", {}, queue.name) },
    { head: "Consumer", cell: (queue) => [badge(queue.paused ? "paused" : server.consumers[live.shortName(queue)]?.state ?? "absent"), queue.consumers > 1 && ` × ${count(queue.consumers)}`] },
    { head: "Action", cell: (queue) => toggle(live.shortName(queue), queue.paused) },
    { head: "Depth", class: "number", cell: (queue) => [count(queue.depth), queue.stale && " (last known)"] },
    { head: "Last minute", cell: (queue) => drawn(queue) },
    { head: "In flight", class: "number", cell: (queue) => count(queue.in_flight) },
    { head: "Oldest", class: "number", cell: (queue) => (queue.oldest_age_ms === null ? "–" : span(queue.oldest_age_ms)) },
    { head: "Retrying", class: "number", cell: (queue) => link(`/inbox?consumer=${live.shortName(queue)}&state=retrying`, count(tally(queue).retrying ?? 0)) },
    { head: "Duplicates", class: "number", cell: (queue) => link(`/inbox?consumer=${live.shortName(queue)}&min_duplicates=1`, count(tally(queue).duplicates ?? 0)) },
    { head: "Dead letters", class: "number", cell: (queue) => [link(`/dead-letters?consumer=${live.shortName(queue)}&state=open`, count(queue.dead_letters)), queue.dlq_depth > 0 && ` and ${count(queue.dlq_depth)} to be filed`] },
  ], queues);
}

function drawn(queue) {
  const spark = sparkline();
  spark.draw(live.history.get(queue.name) ?? []);
  return spark.element;
}

const ABOUT = {
  relay: "sends what waits in the outbox",
  "dead-letters": "files rejected messages as dead letters",
  desk: "commits orders as they come in, many at a time",
  expiry: "ends holds that were not paid in time",
  jobs: "carries on redrives and replays",
  retention: "removes what has been kept long enough",
};

function drawLoops(server, consumers) {
  const rows = Object.entries(server.loops).filter(([name]) => !consumers.includes(name));
  return table("Other loops", [
    { head: "Name", cell: ([name]) => h("strong", {}, name) },
    { head: "What it does", class: "wide", cell: ([name]) => ABOUT[name] ?? "" },
    { head: "State", cell: ([, status]) => badge(status.state) },
    { head: "Last error", class: "wide", cell: ([, status]) => status.last_error ?? "" },
    { head: "Action", cell: ([name, status]) => ["relay", "dead-letters"].includes(name) && toggle(name, status.state === "paused") },
  ], rows);
}

function toggle(name, paused) {
  if (!session.may("operator")) return null;
  const word = paused ? "Resume" : "Pause";
  return act(word, () => post(path`/v1/consumers/${name}/${word.toLowerCase()}`), { class: "small", "aria-label": `${word} ${name}` });
}
