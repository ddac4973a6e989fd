// The inbox: which consumer has dealt with which event, and how often it came.

import { h } from "../dom.js";
import { count, short, time } from "../format.js";
import * as live from "../live.js";
import { list } from "../list.js";
import { badge, empty, link, mono } from "../parts.js";

export default {
  title: "Inbox",
  draw: (context) => [
    h("h1", {}, "Inbox"),
    h("p", { class: "lead" }, "What a consumer has dealt with, it does not do again. Deliveries that came on top are counted as duplicates: ",
      link("/inbox?min_duplicates=1", "show those"), "."),
    list({
      endpoint: "/v1/inbox",
      what: "inbox rows",
      sections: ["inbox", "orders", "reservations"],
      filters: [
        { name: "consumer", label: "Consumer", options: ["", ...live.consumers(context.query.get("consumer"))] },
        { name: "state", label: "State", options: ["", "processing", "processed", "waiting", "retrying", "dead"] },
        { name: "min_duplicates", label: "Duplicates at least", type: "number", min: 0 },
        { name: "event_id", label: "Event id" },
      ],
      nothing: empty("No consumer has seen an event yet.", "Place an order; inventory will be the first to deal with it."),
      columns: [
        { head: "Event", cell: (row) => link(`/inbox?event_id=${row.event_id}`, mono(short(row.event_id), row.event_id)) },
        { head: "Type", cell: (row) => row.event_type },
        { head: "Consumer", cell: (row) => row.consumer },
        { head: "State", cell: (row) => badge(row.state) },
        { head: "Attempts", class: "number", cell: (row) => count(row.attempts) },
        { head: "Duplicates", class: "number", cell: (row) => count(row.duplicates) },
        { head: "First seen", cell: (row) => time(row.started_at) },
        { head: "Done", cell: (row) => time(row.finished_at) },
        { head: "Last error", class: "wide", cell: (row) => row.last_error ?? "" },
      ],
    }, context),
  ],
};
