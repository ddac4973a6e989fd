// The outbox: what waits to be sent, what went, what would not go.

import { path, post, query } from "../api.js";
import { h } from "../dom.js";
import { count, plural, time } from "../format.js";
import { list } from "../list.js";
import * as live from "../live.js";
import { act, badge, empty, link, mono, toast } from "../parts.js";

export default {
  title: "Outbox",
  draw: (context) => [
    h("div", { class: "row top" }, h("h1", {}, "Outbox"), live.picture.server?.outbox?.dead > 0 && act("Send all dead ones again", async () => {
      const { retried } = await post("/v1/outbox/retry", {});
      toast(`${plural(retried, "event")} will be sent again.`);
    })),
    h("p", { class: "lead" }, "Events are written here in the transaction that makes them true, and go out from here. What the broker refused too often is dead, and can be sent again."),
    list({
      endpoint: "/v1/outbox",
      what: "outbox rows",
      sections: ["orders", "server"],
      filters: [
        { name: "status", label: "Status", options: ["", "pending", "published", "failed", "dead"] },
        { name: "aggregate_type", label: "About a", placeholder: "order" },
        { name: "aggregate_id", label: "Its id" },
      ],
      nothing: empty("Nothing has been sent yet.", "Place an order: its event is the first row here."),
      columns: [
        // Only a first publication has the id of its event.
        { head: "Event", cell: (row) => (row.target ? row.event_type : link(`/inbox${query({ event_id: row.id })}`, row.event_type)) },
        { head: "Status", cell: (row) => badge(row.status) },
        { head: "About", cell: (row) => aggregate(row) },
        { head: "To", cell: (row) => row.target || "all that listen" },
        { head: "Attempts", class: "number", cell: (row) => count(row.attempts) },
        { head: "Written", cell: (row) => time(row.created_at) },
        { head: "Sent", cell: (row) => time(row.published_at) },
        { head: "Last error", class: "wide", cell: (row) => row.last_error ?? "" },
        { head: "Action", cell: (row) => row.status === "dead" && act("Send again", async () => {
          await post(path`/v1/outbox/${row.id}/retry`);
          toast("It will be sent again.");
        }, { class: "small" }) },
      ],
    }, context),
  ],
};

function aggregate(row) {
  const words = mono(`${row.aggregate_type} …${row.aggregate_id.slice(-12)}`, row.aggregate_id);
  return ["order", "inventory"].includes(row.aggregate_type) ? link(path`/orders/${row.aggregate_id}`, words) : words;
}
