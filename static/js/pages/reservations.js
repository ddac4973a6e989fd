// Reservations: what is held for whom.

import { path } from "../api.js";
import { h } from "../dom.js";
import { lines, short, time } from "../format.js";
import { list } from "../list.js";
import { badge, empty, link, mono } from "../parts.js";

export default {
  title: "Reservations",
  draw: (context) => [
    h("h1", {}, "Reservations"),
    list({
      endpoint: "/v1/reservations",
      what: "reservations",
      sections: ["reservations"],
      filters: [
        { name: "state", label: "State", options: ["", "held", "committed", "fulfilled", "released"] },
        { name: "sku", label: "SKU" },
        { name: "order_id", label: "Order id" },
      ],
      nothing: empty("Nothing is reserved yet.", "Each order that can be filled gets one reservation, all of it or nothing. ", link("/orders", "Place an order"), "."),
      columns: [
        { head: "Reservation", cell: (row) => link(path`/orders/${row.order_id}`, row.number) },
        { head: "State", cell: (row) => badge(row.state) },
        { head: "Items", class: "wide", cell: (row) => lines(row.lines) },
        { head: "Order", cell: (row) => mono(short(row.order_id), row.order_id) },
        { head: "Reserved", cell: (row) => time(row.created_at) },
        { head: "Changed", cell: (row) => time(row.updated_at) },
      ],
    }, context),
  ],
};
