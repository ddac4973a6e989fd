// Orders: what was asked for and what became of it.

import { get, path, post } from "../api.js";
import { h } from "../dom.js";
import { count, lines, money, time } from "../format.js";
import { list } from "../list.js";
import { ask, badge, button, empty, link } from "../parts.js";
import { navigate } from "../router.js";

const STATUSES = ["", "placed", "reserved", "rejected", "paid", "cancelled", "expired", "fulfilled"];

export default {
  title: "Orders",
  draw: (context) => [
    h("div", { class: "row top" }, h("h1", {}, "Orders"), button("New order", newOrder, { class: "primary" })),
    list({
      endpoint: "/v1/orders",
      what: "orders",
      sections: ["orders"],
      filters: [
        { name: "status", label: "Status", options: STATUSES },
        { name: "sku", label: "SKU" },
        { name: "customer_id", label: "Customer" },
        { name: "correlation_id", label: "Correlation id" },
      ],
      nothing: empty("No orders yet.", "An order is committed before its call answers; stock is reserved through messages right after. Place one with the button above."),
      columns: [
        { head: "Order", cell: (order) => link(path`/orders/${order.number}`, order.number) },
        { head: "Status", cell: (order) => badge(order.status) },
        { head: "Customer", cell: (order) => link(`/orders?customer_id=${encodeURIComponent(order.customer_id)}`, order.customer_id) },
        { head: "Items", class: "wide", cell: (order) => lines(order.items) },
        { head: "Total", class: "number", cell: (order) => money(order.total_minor, order.currency) },
        { head: "Placed", cell: (order) => time(order.created_at) },
        { head: "Reason", class: "wide", cell: (order) => order.reason ?? "" },
      ],
    }, context),
  ],
};

async function newOrder() {
  const { data } = await get("/v1/stock?limit=200").catch(() => ({ data: [] }));
  const shelves = data.map((shelf) => [shelf.sku, `${shelf.sku} (${count(shelf.available)} available)`]);
  ask({
    title: "New order",
    words: "It is committed when the server answers. Ask for more than there is, and it will be rejected with the reason.",
    confirm: "Place it",
    fields: [
      { name: "customer_id", label: "Customer", value: "alice", required: true, maxlength: 128 },
      { name: "sku", label: "SKU", required: true, ...(shelves.length ? { options: shelves, value: shelves[0][0] } : {}) },
      { name: "quantity", label: "Quantity", type: "number", min: 1, value: "1", required: true },
      { name: "unit_price_minor", label: "Unit price in cents", type: "number", min: 0, value: "1250", required: true },
    ],
    async work({ customer_id, sku, quantity, unit_price_minor }) {
      const items = [{ sku, quantity: Number(quantity), unit_price_minor: Number(unit_price_minor) }];
      const order = await post("/v1/orders", { customer_id, items });
      navigate(path`/orders/${order.number}`);
    },
  });
}
