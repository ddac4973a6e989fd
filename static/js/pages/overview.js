// The overview: a sentence that tells the worst first, the pipeline as a picture, the promises, and what is going on.

import { get, path, post } from "../api.js";
import { h, isHeld, put, say, svg } from "../dom.js";
import { ago, count, lines, span, time } from "../format.js";
import { headline } from "../headline.js";
import { strip } from "../invariants.js";
import * as live from "../live.js";
import * as session from "../session.js";
import { act, badge, card, empty, link, sparkline, table, toast } from "../parts.js";

export default {
  title: "Overview",
  draw({ signal }) {
    const sentence = h("p", { class: "sentence" });
    const advice = h("p", { class: "advice" });
    const icon = h("span", { class: "big-mark", "aria-hidden": "true" });
    const news = h("div", { class: "headline", id: "headline", "aria-live": "polite" }, icon, h("div", {}, sentence, advice));
    const pipeline = h("div", { class: "pipeline" });
    const orders = h("div", { id: "latest-orders" }, skeleton());
    const reservations = h("div", { id: "live-reservations" }, skeleton());
    const stages = new Map();

    const update = () => {
      const now = headline(live.picture, live.state);
      news.dataset.tone = now.tone;
      say(icon, { ok: "✓", warn: "!", bad: "✕", idle: "…" }[now.tone]);
      say(sentence, now.words);
      if (advice.dataset.key !== now.words) {
        advice.dataset.key = now.words;
        put(advice, now.advice);
      }
      if (live.picture.queues) drawPipeline(pipeline, stages);
      if (live.picture.orders && !isHeld(orders)) put(orders, ordersTable(live.picture.orders.data));
      if (live.picture.reservations && !isHeld(reservations)) put(reservations, reservationsTable(live.picture.reservations));
    };
    live.watch((names) => {
      if (names.length === 1 && names[0] === "history") drawHistory(stages);
      else update();
    }, signal);
    update();

    return h("div", { class: "overview" },
      h("div", { class: "row top" }, h("h1", {}, "Overview"), session.may("client") && act("Place a test order", placeTestOrder, { class: "primary", id: "test-order" })),
      news,
      session.isPlatform() ? [card("The road of an order", { class: "card road" }, pipeline), strip(signal)]
        : h("p", { class: "quiet" }, "The queues and the promises are those of all tenants together; to see them needs a key for every group."),
      h("div", { class: "two" },
        card("Live reservations", {}, reservations, h("p", { class: "more" }, link("/reservations", "All reservations"))),
        card("Latest orders", {}, orders, h("p", { class: "more" }, link("/orders", "All orders")))));
  },
};

/** One unit of something that is there, for a customer called test. */
async function placeTestOrder() {
  const { data } = await get("/v1/stock?limit=200");
  const there = data.filter((shelf) => shelf.available > 0);
  const sku = (there[Math.floor(Math.random() * there.length)] ?? data[0])?.sku ?? "WIDGET-A";
  const order = await post("/v1/orders", { customer_id: "test", items: [{ sku, quantity: 1, unit_price_minor: 1250 }] });
  toast("Placed ", link(path`/orders/${order.number}`, order.number), `: one ${sku}. Watch it being reserved.`);
}

function skeleton() {
  return h("p", { class: "quiet" }, "Looking…");
}

function ordersTable(rows) {
  if (!rows.length) return empty("No orders yet.", "Place one with the button above, or with curl; see ", link("/docs/", "the API docs"), ".");
  return table("Latest orders", [
    { head: "Order", cell: (order) => link(path`/orders/${order.number}`, order.number) },
    { head: "Items", class: "wide", cell: (order) => lines(order.items) },
    { head: "Status", cell: (order) => badge(order.status) },
    { head: "Placed", cell: (order) => ago(order.created_at) },
  ], rows);
}

function reservationsTable(rows) {
  if (!rows.length) return empty("Nothing is reserved yet.", "Stock is reserved a few milliseconds after an order is placed. Place one and watch it appear here.");
  return table("Live reservations", [
    { head: "Reservation", cell: (row) => link(path`/orders/${row.order_id}`, row.number) },
    { head: "Items", class: "wide", cell: (row) => lines(row.lines) },
    { head: "State", cell: (row) => badge(row.state) },
    { head: "Since", cell: (row) => time(row.created_at) },
  ], rows);
}

/** Who hears from whom: orders that are placed and paid go to inventory and the ledger, inventory's answers to the rest. */
const COLUMNS = [["inventory", "ledger"], ["orders", "notifications"]];

function drawPipeline(element, stages) {
  const { queues, inbox = [], server, orders } = live.picture;
  const names = queues.map((queue) => live.shortName(queue));
  const known = names.join(" ");
  if (element.dataset.known !== known) {
    element.dataset.known = known;
    stages.clear();
    const first = entrance();
    stages.set("", first);
    const columns = COLUMNS.map((column) => column.filter((name) => names.includes(name)));
    columns[1].push(...names.filter((name) => !COLUMNS.flat().includes(name)));
    const drawn = columns.filter((column) => column.length).flatMap((column) => [arrow(), h("div", { class: "column" }, column.map((name) => {
      const stage = station(name);
      stages.set(name, stage);
      return stage.element;
    }))]);
    put(element, h("div", { class: "column" }, first.element), drawn);
  }
  stages.get("").update(orders, server);
  for (const queue of queues) {
    const name = live.shortName(queue);
    stages.get(name)?.update(queue, inbox.find((row) => row.consumer === name), server?.consumers?.[name]);
  }
  drawHistory(stages);
}

function drawHistory(stages) {
  for (const queue of live.picture.queues ?? []) stages.get(live.shortName(queue))?.spark.draw(live.history.get(queue.name) ?? []);
}

function arrow() {
  return svg("svg", { class: "arrow", viewBox: "0 0 32 24", "aria-hidden": "true" }, svg("path", { d: "M2 12h24M19 5l8 7-8 7" }));
}

/** Where orders come in: the API and the outbox. */
function entrance() {
  const rate = h("a", { class: "figure", href: "/orders" }, "0");
  const waiting = link("/outbox?status=pending", "0");
  const refused = link("/outbox?status=dead", "0");
  const oldest = h("span", {}, "–");
  const relay = h("span", {});
  return {
    element: h("article", { class: "stage", "aria-label": "Orders placed" },
      h("header", {}, h("h3", {}, "Orders placed"), relay),
      h("p", { class: "depth" }, rate, h("span", { class: "unit" }, " in the last minute")),
      h("dl", {}, fact("Waiting to be sent (outbox)", waiting), fact("Oldest of them", oldest), fact("Would not go", refused))),
    update(orders, server) {
      if (orders) say(rate, `${count(orders.placed_last_minute)}${orders.at_least ? "+" : ""}`);
      const outbox = server?.outbox;
      say(waiting, count(outbox?.pending));
      say(refused, count(outbox?.dead));
      refused.classList.toggle("alarm", (outbox?.dead ?? 0) > 0);
      say(oldest, outbox?.oldest_due_ms ? span(outbox.oldest_due_ms) : "–");
      const state = server?.relay?.state;
      if (state && relay.dataset.state !== state) {
        relay.dataset.state = state;
        put(relay, state === "running" ? null : badge(`relay ${state}`, "warn"));
      }
    },
  };
}

/** A consumer and its queue. */
function station(name) {
  const depth = h("a", { class: "figure", href: `/queues?consumer=${name}` }, "0");
  const spark = sparkline();
  const state = h("span", {});
  const flight = link(`/queues?consumer=${name}`, "0");
  const retrying = link(`/inbox?consumer=${name}&state=retrying`, "0");
  const waiting = link(`/inbox?consumer=${name}&state=waiting`, "0");
  const repeated = link(`/inbox?consumer=${name}&min_duplicates=1`, "0");
  const letters = link(`/dead-letters?consumer=${name}&state=open`, "0");
  const waitingFact = fact("Waiting for another event", waiting);
  const next = h("span", { class: "quiet" });
  let paused = false;
  const toggle = act("Pause", () => post(path`/v1/consumers/${name}/${paused ? "resume" : "pause"}`), { class: "small", "aria-label": `Pause ${name}` });
  return {
    spark,
    element: h("article", { class: "stage", "data-consumer": name, "aria-label": `Queue of ${name}` },
      h("header", {}, h("h3", { class: "name" }, name), state, session.may("operator") && toggle),
      h("p", { class: "depth" }, depth, h("span", { class: "unit" }, " in its queue"), spark.element),
      h("dl", {}, fact("In flight", flight), fact("Retrying", [retrying, next]), waitingFact, fact("Duplicates suppressed", repeated), fact("Dead letters", letters))),
    update(queue, inbox, status) {
      say(depth, count(queue.depth));
      say(flight, count(queue.in_flight));
      say(retrying, count(inbox?.retrying ?? 0));
      say(next, inbox?.next_retry_at ? `, next ${span(new Date(inbox.next_retry_at) - Date.now())}` : "");
      say(waiting, count(inbox?.waiting ?? 0));
      waitingFact.hidden = !inbox?.waiting;
      say(repeated, count(inbox?.duplicates ?? 0));
      say(letters, count(queue.dead_letters + queue.dlq_depth));
      letters.classList.toggle("alarm", queue.dead_letters + queue.dlq_depth > 0);
      paused = queue.paused;
      const word = paused ? "paused" : status?.state ?? "absent";
      if (state.dataset.state !== word) {
        state.dataset.state = word;
        put(state, badge(word));
        put(toggle, paused ? "Resume" : "Pause");
        toggle.setAttribute("aria-label", `${paused ? "Resume" : "Pause"} ${name}`);
      }
    },
  };
}

function fact(term, value) {
  return h("div", {}, h("dt", {}, term), h("dd", {}, value));
}

