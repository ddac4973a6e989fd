// Notifications: what customers were told, once each.

import { path } from "../api.js";
import { h } from "../dom.js";
import { short, time } from "../format.js";
import { list } from "../list.js";
import { badge, empty, link } from "../parts.js";

export default {
  title: "Notifications",
  draw: (context) => [
    h("h1", {}, "Notifications"),
    list({
      endpoint: "/v1/notifications",
      what: "notifications",
      sections: ["orders", "reservations"],
      filters: [
        { name: "kind", label: "About", options: ["", "reserved", "rejected", "paid", "cancelled", "expired"] },
        { name: "state", label: "State", options: ["", "pending", "sending", "sent", "failed", "unknown"] },
        { name: "order_id", label: "Order id" },
      ],
      nothing: empty("Nobody has been told anything yet.", "A customer is told once of each outcome, however often the event arrives."),
      columns: [
        { head: "About", cell: (row) => badge(row.kind) },
        { head: "State", cell: (row) => badge(row.state) },
        { head: "Channel", cell: (row) => row.channel },
        { head: "Order", cell: (row) => link(path`/orders/${row.order_id}`, short(row.order_id)) },
        { head: "When", cell: (row) => time(row.created_at) },
      ],
    }, context),
  ],
};
