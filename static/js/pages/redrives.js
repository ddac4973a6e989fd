// Redrives: dead letters sent back in bulk.

import { h } from "../dom.js";
import { filterForm, jobs, proposeRedrive } from "../jobs.js";
import { act, card, empty, link } from "../parts.js";

export default {
  title: "Redrives",
  draw: (context) => {
    const form = filterForm({
      consumer: { label: "Consumer", options: "consumers" },
      reason: { label: "Reason", placeholder: "retries-exhausted" },
      event_type: { label: "Event type", placeholder: "order.placed" },
      from: { label: "Filed from", type: "datetime-local" },
      to: { label: "Filed before", type: "datetime-local" },
    }, act("Try it, then ask", () => proposeRedrive(form.values(), "Redrive"), { class: "primary" }));
    return [
      h("h1", {}, "Redrives"),
      h("p", { class: "lead" }, "Sends dead letters back to their queues: the same bytes under the same ids, from a set frozen at the start, at a rate. What turns out to be done already is reported, not repeated. Letters of one kind, and single ones, are on ", link("/dead-letters", "dead letters"), "."),
      card("Send letters back", {}, form.element),
      jobs({ endpoint: "/v1/redrives", what: "redrives", letters: true, nothing: empty("No redrives yet.", "Once the cause of some dead letters is mended, send them back with the form above. Nothing is sent before you have seen what it would do.") }, context),
    ];
  },
};
