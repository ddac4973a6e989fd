// Replays: published events sent again; the inbox makes them change nothing that was done.

import { h } from "../dom.js";
import { filterForm, jobs, proposeReplay } from "../jobs.js";
import { act, card, empty } from "../parts.js";

const HOUR_MS = 3_600_000;

export default {
  title: "Replays",
  forPlatform: true,
  draw: (context) => {
    const form = filterForm({
      from: { label: "From", type: "datetime-local", value: new Date(Date.now() - HOUR_MS), required: true },
      to: { label: "To", type: "datetime-local" },
      aggregate_type: { label: "About", options: [["", "everything"], "order", "inventory", "stock_adjustment"] },
      consumer: { label: "To whom", options: "consumers", any: "all consumers" },
    }, act("Try it, then ask", () => proposeReplay(form.values()), { class: "primary" }));
    return [
      h("h1", {}, "Replays"),
      h("p", { class: "lead" }, "Sends published events again, the archived ones too: to a consumer that is new, or whose tables were lost. Effects that were applied already are skipped by the inbox."),
      card("Send events again", {}, form.element),
      jobs({ endpoint: "/v1/replays", what: "replays", nothing: empty("No replays yet.", "A replay is safe to try: consumers that have dealt with an event do nothing when it comes again.") }, context),
    ];
  },
};
