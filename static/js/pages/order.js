// One order: what it waits for, what became of it, and every hop it made.

import { get, path, post, query, text } from "../api.js";
import { h, isPressed, redraw } from "../dom.js";
import { ago, count, indented, money, span, time } from "../format.js";
import { follow } from "../list.js";
import { act, ask, badge, button, card, copy, facts, link, mono, table, toast, verbatim } from "../parts.js";
import { bars, story } from "../timeline.js";

const VIEWS = [["story", "Story"], ["bars", "Timeline"], ["raw", "Raw"]];

export default {
  title: "Order",
  async draw({ params, query: asked, signal }) {
    const view = VIEWS.some(([key]) => key === asked.get("view")) ? asked.get("view") : "story";
    const body = h("div", {});
    let known = null;
    const look = async () => {
      const now = await around(params.id, view, signal);
      const words = JSON.stringify(now);
      if (words === known) return; // so that nobody loses a selection for nothing
      known = words;
      redraw(body, draw(now, view, look));
    };
    await look();
    // What is there stays until the server is back.
    follow(["orders", "reservations", "inbox", "queues"], signal, () => isPressed() || look().catch(() => {}));
    return body;
  },
};

/** Everything that is about the order, wherever it is kept. */
async function around(id, view, signal) {
  const order = await get(path`/v1/orders/${id}`, signal);
  const of = query({ order_id: order.id, limit: 50 });
  const at = path`/v1/orders/${order.id}/timeline`;
  const [reservations, notices, entries, timeline, raw] = await Promise.all([
    get(`/v1/reservations${of}`, signal),
    get(`/v1/notifications${of}`, signal),
    get(`/v1/ledger/entries${of}`, signal),
    get(at, signal),
    view === "raw" && Promise.all([text(path`/v1/orders/${order.id}`, signal), text(at, signal)]),
  ]);
  return { order, reservations: reservations.data, notices: notices.data, entries: entries.data, timeline, raw };
}

function draw({ order, timeline, raw, ...effects }, view, refresh) {
  const took = order.status === "placed" ? null : span(new Date(order.updated_at) - new Date(order.created_at));
  return [
    h("p", { class: "crumbs" }, link("/orders", "Orders")),
    h("div", { class: "row top" },
      h("div", { class: "row" }, h("h1", {}, order.number), badge(order.status), took && h("span", { class: "quiet", title: "From placed to this state" }, `after ${took}`)),
      actions(order, refresh)),
    card(null, { class: "card waits" }, steps(order),
      h("p", { id: "waiting" }, waits(timeline.waiting_for, order)),
      timeline.also.length > 0 && h("ul", { class: "also" }, timeline.also.map((sentence) => h("li", {}, capital(sentence), ".")))),
    h("div", { class: "two" },
      card("Order", {}, facts([
        ["Customer", link(`/orders${query({ customer_id: order.customer_id })}`, order.customer_id)],
        ["Total", money(order.total_minor, order.currency)],
        order.reason && ["Reason", order.reason],
        ["Placed", time(order.created_at)],
        ["Changed", time(order.updated_at)],
        order.hold_expires_at && order.status === "reserved" && ["Held until", [time(order.hold_expires_at), " (", ago(order.hold_expires_at), ")"]],
        ["Id", mono(order.id)],
        ["Correlation id", mono(order.correlation_id)],
      ]),
      h("div", { class: "row" }, button("Copy as curl", () => copy(curl(order)), { class: "small" }), button("Copy the link", () => copy(location.href), { class: "small" }))),
      card("What it brought about", {},
        table("Items", [
          { head: "SKU", cell: (item) => link(`/stock${query({ sku: item.sku })}`, item.sku) },
          { head: "Quantity", class: "number", cell: (item) => count(item.quantity) },
          { head: "Each", class: "number", cell: (item) => money(item.unit_price_minor, order.currency) },
        ], order.items),
        drawEffects(effects, order))),
    card("Every hop", { id: "timeline" }, tabs(view), content(view, timeline.hops, order, raw)),
  ];
}

/** The road that most orders take, and where this one is on it or left it. */
function steps(order) {
  const road = ["placed", "reserved", "paid", "fulfilled"];
  const ends = ["rejected", "cancelled", "expired"].includes(order.status) ? ["placed", order.status] : road;
  const at = ends.indexOf(order.status);
  return h("ol", { class: "steps", "aria-label": "Its road" }, ends.map((step, index) => {
    const state = index > at ? "todo" : ends !== road && index === at ? "ended" : "done";
    return h("li", { class: state, "aria-current": index === at ? "step" : null },
      h("span", { class: "mark", "aria-hidden": "true" }, { done: "✓", todo: "○", ended: "✕" }[state]), step, h("span", { class: "unseen" }, state === "todo" ? ", not yet" : ""));
  }));
}

function capital(words) {
  return words.charAt(0).toUpperCase() + words.slice(1);
}

/** The server's sentence; the end of a hold in the reader's own time. */
function waits(sentence, order) {
  const until = /^(.* until )\d\d:\d\d$/.exec(sentence);
  return until && order.hold_expires_at ? [capital(until[1]), time(order.hold_expires_at), "."] : `${capital(sentence)}.`;
}

function actions(order, refresh) {
  const to = (road) => path`/v1/orders/${order.id}/${road}`;
  const buttons = [];
  if (order.status === "reserved") {
    buttons.push(act(`Pay ${money(order.total_minor, order.currency)}`, async () => {
      await post(to("payments"), { amount_minor: order.total_minor, currency: order.currency });
      toast(`${order.number} is paid.`);
      await refresh();
    }, { class: "primary" }));
  }
  if (order.status === "paid") {
    buttons.push(act("Fulfil", async () => {
      await post(to("fulfil"), {});
      toast(`${order.number} is fulfilled.`);
      await refresh();
    }, { class: "primary" }));
  }
  if (["placed", "reserved"].includes(order.status)) {
    buttons.push(act("Cancel…", () => ask({
      title: `Cancel ${order.number}`,
      words: "Its stock goes back on the shelf.",
      confirm: "Cancel the order",
      danger: true,
      async work() {
        await post(to("cancel"), {});
        await refresh();
      },
    })));
  }
  return buttons.length > 0 && h("div", { class: "row" }, buttons);
}

function drawEffects({ reservations, notices, entries }, order) {
  const each = (rows, none, line) => (rows.length ? rows.map((row) => h("div", { class: "row" }, line(row))) : h("span", { class: "quiet" }, none));
  return facts([
    ["Reservation", each(reservations, "none", (row) => [link(`/reservations${query({ order_id: order.id })}`, row.number), badge(row.state)])],
    ["Customer told", each(notices, "nothing yet", (row) => [badge(row.kind), h("span", {}, `by ${row.channel}, ${row.state}, `, time(row.created_at))])],
    ["Ledger", each(entries, order.total_minor === 0 ? "nothing to book" : "nothing booked", (row) => [link(`/ledger${query({ account: row.account })}`, row.account), money(row.amount_minor, row.currency)])],
  ]);
}

function tabs(view) {
  return h("p", { class: "tabs" }, VIEWS.map(([key, words]) =>
    h("a", { href: `${location.pathname}?view=${key}`, "aria-current": key === view ? "true" : null }, words)));
}

function content(view, hops, order, raw) {
  if (view === "raw") return raw.map((json, index) => verbatim(indented(json), { label: ["Order", "Timeline"][index], name: `${order.number}.json` }));
  return view === "bars" ? bars(hops) : story(hops);
}

function curl(order) {
  const items = order.items.map(({ sku, quantity, unit_price_minor }) => ({ sku, quantity, unit_price_minor }));
  const body = JSON.stringify({ customer_id: order.customer_id, currency: order.currency, items }).replaceAll("'", "'\\''");
  return `curl -s ${location.origin}/v1/orders -H 'Content-Type: application/json' -d '${body}'`;
}
