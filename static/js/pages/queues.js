// Queues and consumers: how full, how old, and whether at rest.

import { path, post } from "../api.js";
import { h, isHeld, put } from "../dom.js";
import { count, span } from "../format.js";
import * as live from "../live.js";
import { act, badge, card, link, sparkline, table } from "../parts.js";
import { shortName } from "./overview.js";

export default {
  title: "Queues",
  draw({ signal }) {
    const body = h("div", {}, h("p", { class: "quiet" }, "Looking…"));
    const others = h("div", {});
    const update = (names) => {
      const { queues, server, inbox = [] } = live.picture;
      if (!queues || !server || (names.length === 1 && names[0] === "history")) return;
      if (!isHeld(body)) put(body, drawQueues(queues, inbox, server));
      if (!isHeld(others)) put(others, drawLoops(server, queues.map(shortName)));
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
  const tally = (queue) => inbox.find((row) => row.consumer === shortName(queue)) ?? {};
  return table("Queues", [
    { head: "Queue", cell: (queue) => h("strong", {}, queue.name) },
    { head: "Consumer", cell: (queue) => badge(queue.paused ? "paused" : server.loops[shortName(queue)]?.state ?? "elsewhere") },
    { head: "Depth", class: "number", cell: (queue) => [count(queue.depth), queue.stale && " (last known)"] },
    { head: "Last minute", cell: (queue) => drawn(queue) },
    { head: "In flight", class: "number", cell: (queue) => count(queue.in_flight) },
    { head: "Oldest", class: "number", cell: (queue) => (queue.oldest_age_ms === null ? "–" : span(queue.oldest_age_ms)) },
    { head: "Consumers", class: "number", cell: (queue) => count(queue.consumers) },
    { head: "Retrying", class: "number", cell: (queue) => link(`/inbox?consumer=${shortName(queue)}&state=retrying`, count(tally(queue).retrying ?? 0)) },
    { head: "Duplicates", class: "number", cell: (queue) => link(`/inbox?consumer=${shortName(queue)}&min_duplicates=1`, count(tally(queue).duplicates ?? 0)) },
    { head: "Dead letters", class: "number", cell: (queue) => [link(`/dead-letters?consumer=${shortName(queue)}&state=open`, count(queue.dead_letters)), queue.dlq_depth > 0 && ` and ${count(queue.dlq_depth)} to be filed`] },
    { head: "Action", cell: (queue) => toggle(shortName(queue), queue.paused) },
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
  const word = paused ? "Resume" : "Pause";
  const element = act(word, async () => {
    await post(path`/v1/consumers/${name}/${word.toLowerCase()}`);
    element.blur(); // so that the row may change under it
  }, { class: "small", "aria-label": `${word} ${name}` });
  return element;
}
