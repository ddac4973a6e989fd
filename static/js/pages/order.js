// One order: what it waits for, what became of it, and every hop it made.

import { find, get, path, post, query } from "../api.js";
import { h, put } from "../dom.js";
import { count, money, span, time } from "../format.js";
import { follow } from "../list.js";
import { act, ask, badge, button, card, copy, facts, link, mono, table, toast, verbatim } from "../parts.js";
import { bars, hopsOf, story } from "../timeline.js";

const VIEWS = [["story", "Story"], ["bars", "Timeline"], ["raw", "Raw"]];

export default {
  title: "Order",
  async draw({ params, query: asked, signal }) {
    const body = h("div", {});
    const look = async () => {
      const order = await get(path`/v1/orders/${params.id}`, signal);
      const related = await around(order, signal);
      put(body, draw(order, related, asked.get("view") ?? "story", look));
    };
    await look();
    follow(["orders", "reservations", "inbox"], signal, () => look().catch(() => {}));
    return body;
  },
};

/** Everything that is about the order, wherever it is kept. */
async function around(order, signal) {
  const of = query({ order_id: order.id, limit: 50 });
  const [reservations, notices, entries, sent, timeline] = await Promise.all([
    find(`/v1/reservations${of}`, signal),
    find(`/v1/notifications${of}`, signal),
    find(`/v1/ledger/entries${of}`, signal),
    find(`/v1/outbox${query({ aggregate_id: order.id, limit: 100 })}`, signal),
    find(path`/v1/orders/${order.id}/timeline`, signal),
  ]);
  const events = (sent?.data ?? []).filter((row) => !row.target);
  const seen = timeline ? [] : await Promise.all(events.map((row) => find(`/v1/inbox${query({ event_id: row.id, limit: 20 })}`, signal)));
  return {
    reservations: reservations?.data ?? [],
    notices: notices?.data ?? [],
    entries: entries?.data,
    sent: sent?.data ?? [],
    seen: seen.flatMap((page) => page?.data ?? []),
    timeline,
  };
}

function draw(order, related, view, refresh) {
  const hops = hopsOf(order, related);
  const waiting = related.timeline?.waiting_for ?? waitsFor(order);
  const took = order.status === "placed" ? "" : ` · ${span(new Date(order.updated_at) - new Date(order.created_at))}`;
  return [
    h("p", { class: "crumbs" }, link("/orders", "Orders")),
    h("div", { class: "row top" }, h("h1", {}, order.number), h("span", { class: "row" }, badge(order.status), h("span", { class: "quiet" }, took))),
    h("p", { class: "lead", id: "waiting" }, waiting),
    actions(order, refresh),
    h("div", { class: "two" },
      card("Order", {}, facts([
        ["Customer", link(`/orders?customer_id=${encodeURIComponent(order.customer_id)}`, order.customer_id)],
        ["Total", money(order.total_minor, order.currency)],
        order.reason && ["Reason", order.reason],
        ["Placed", time(order.created_at)],
        ["Changed", time(order.updated_at)],
        order.hold_expires_at && ["Held until", time(order.hold_expires_at)],
        ["Id", mono(order.id)],
        ["Correlation id", mono(order.correlation_id)],
      ]),
      table("Items", [
        { head: "SKU", cell: (item) => link(`/stock?sku=${encodeURIComponent(item.sku)}`, item.sku) },
        { head: "Quantity", class: "number", cell: (item) => count(item.quantity) },
        { head: "Each", class: "number", cell: (item) => money(item.unit_price_minor, order.currency) },
      ], order.items),
      h("div", { class: "row" }, button("Copy as curl", () => copy(curl(order)), { class: "small" }))),
      card("What it brought about", {}, effects(related))),
    card("Every hop", { id: "timeline" }, tabs(view), content(view, hops, order, related)),
  ];
}

function waitsFor(order) {
  return {
    placed: "It waits for inventory to reserve its stock.",
    reserved: "Its stock is held. It waits to be paid, cancelled, or to expire.",
    paid: "It is paid and waits to be fulfilled.",
    rejected: order.reason ?? "It could not be filled.",
    cancelled: "It was cancelled; its stock is free again.",
    expired: "It was not paid in time; its stock is free again.",
    fulfilled: "It is fulfilled. Nothing is left to do.",
  }[order.status] ?? "";
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

function effects({ reservations, notices, entries }) {
  const none = (words) => h("span", { class: "quiet" }, words);
  return facts([
    ["Reservation", reservations.length ? reservations.map((row) => h("div", {}, row.number, " ", badge(row.state))) : none("none")],
    ["Customer told", notices.length ? notices.map((row) => h("div", {}, badge(row.kind), ` by ${row.channel}, `, time(row.created_at))) : none("nothing yet")],
    entries && ["Ledger", entries.length ? entries.map((row) => h("div", {}, row.account, " ", money(row.amount_minor, row.currency))) : none("nothing booked")],
  ]);
}

function tabs(view) {
  return h("p", { class: "tabs" }, VIEWS.map(([key, words]) =>
    h("a", { href: `${location.pathname}?view=${key}`, "aria-current": key === view ? "true" : null }, words)));
}

function content(view, hops, order, related) {
  if (view === "raw") {
    const raw = related.timeline ?? { order, outbox: related.sent, inbox: related.seen };
    return verbatim(JSON.stringify(raw, null, 2), { label: "Raw", name: `${order.number}.json` });
  }
  return view === "bars" ? bars(hops) : story(hops);
}

function curl(order) {
  const items = order.items.map(({ sku, quantity, unit_price_minor }) => ({ sku, quantity, unit_price_minor }));
  const body = JSON.stringify({ customer_id: order.customer_id, currency: order.currency, items }).replaceAll("'", "'\\''");
  return `curl -s ${location.origin}/v1/orders -H 'Content-Type: application/json' -d '${body}'`;
}
