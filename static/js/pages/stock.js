// Stock: what is on the shelf, what is promised, and adjusting it.

import { get, path, post, put as put_ } from "../api.js";
import { h, isHeld, put, redraw } from "../dom.js";
import { count, time } from "../format.js";
import { follow } from "../list.js";
import { act, ask, button, complain, empty, failure, link, table, toast } from "../parts.js";

export default {
  title: "Stock",
  draw(context) {
    const { query, signal } = context;
    const sku = query.get("sku");
    const body = h("div", { class: "list" }, h("p", { class: "quiet" }, "Looking…"));
    let rows = [];
    let cursor = null;
    const load = async (more) => {
      if (sku) {
        rows = [await get(path`/v1/stock/${sku}`, signal)];
      } else {
        const page = await get(`/v1/stock?limit=100${more ? `&cursor=${cursor}` : ""}`, signal);
        rows = more ? [...rows, ...page.data] : page.data;
        cursor = page.next_cursor;
      }
      redraw(body, rows.length ? shelves(rows, refresh) : empty("The shelves are empty.", "Put something on one with the button above; orders for what is not there are rejected."),
        cursor && h("div", { class: "row" }, act("Show more", () => load(true))));
    };
    const refresh = () => load(false).catch((error) => {
      if (error.name !== "AbortError") put(body, failure(error, sku ? `the shelf ${sku}` : "the stock"));
    });
    refresh();
    follow(["reservations", "orders"], signal, () => {
      if (rows.length <= 100 && !isHeld(body)) refresh();
    });
    return [
      h("div", { class: "row top" }, h("h1", {}, "Stock"), button("Set a shelf", () => setShelf(refresh), { class: "primary" })),
      sku && h("p", {}, "Only ", h("strong", {}, sku), ". ", link("/stock", "Show all")),
      body,
    ];
  },
};

function shelves(rows, refresh) {
  return table("Stock", [
    { head: "SKU", cell: (row) => link(`/reservations?sku=${encodeURIComponent(row.sku)}`, row.sku) },
    { head: "Available", class: "number", cell: (row) => count(row.available) },
    { head: "Reserved", class: "number", cell: (row) => count(row.reserved) },
    { head: "On hand", class: "number", cell: (row) => count(row.on_hand) },
    { head: "Share reserved", class: "wide", cell: (row) => meter(row) },
    { head: "Changed", cell: (row) => time(row.updated_at) },
    { head: "Action", cell: (row) => button("Adjust", () => adjust(row, refresh), { class: "small", "aria-label": `Adjust ${row.sku}` }) },
  ], rows);
}

function meter({ sku, reserved, on_hand }) {
  const percent = on_hand ? Math.round((100 * reserved) / on_hand) : 0;
  return h("span", { class: "meter" }, h("progress", { max: "100", value: String(percent), "aria-label": `${sku}: share reserved` }), ` ${percent} %`);
}

function adjust(row, refresh) {
  ask({
    title: `Adjust ${row.sku}`,
    words: `There are ${count(row.on_hand)} on hand, ${count(row.reserved)} of them reserved. What is reserved cannot be taken away.`,
    confirm: "Adjust",
    fields: [
      { name: "delta", label: "Change", type: "number", value: "10", required: true, hint: "Minus takes away." },
      { name: "reason", label: "Reason", value: "", required: true, maxlength: 200, hint: "Kept with the adjustment." },
    ],
    async work({ delta, reason }) {
      const now = await post(path`/v1/stock/${row.sku}/adjustments`, { delta: Number(delta), reason });
      toast(`${row.sku}: ${count(now.on_hand)} on hand, ${count(now.available)} available.`);
      refresh().catch(complain);
    },
  });
}

function setShelf(refresh) {
  ask({
    title: "Set a shelf",
    words: "Says how many there are. A SKU that is not there yet is made.",
    confirm: "Set",
    fields: [
      { name: "sku", label: "SKU", required: true, value: "", maxlength: 64 },
      { name: "on_hand", label: "On hand", type: "number", min: 0, value: "100", required: true },
    ],
    async work({ sku, on_hand }) {
      await put_(path`/v1/stock/${sku}`, { on_hand: Number(on_hand) });
      toast(`${sku} is set.`);
      refresh().catch(complain);
    },
  });
}
