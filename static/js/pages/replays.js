// Replays: published events sent again; the inbox makes them change nothing that was done.

import { post } from "../api.js";
import { h, put } from "../dom.js";
import { plural } from "../format.js";
import { jobs } from "../jobs.js";
import * as live from "../live.js";
import { act, card, failure, input, labelled, toast } from "../parts.js";
import { shortName } from "./overview.js";

export default {
  title: "Replays",
  draw: ({ signal }) => [
    h("h1", {}, "Replays"),
    h("p", { class: "lead" }, "Sends published events again, to all consumers or to one: to one that is new, or whose tables were lost. Effects that were applied already are skipped by the inbox."),
    card("Send events again", {}, form()),
    jobs("/v1/replays", "replays", signal),
  ],
};

function form() {
  const consumers = (live.picture.queues ?? []).map(shortName);
  const hour = new Date(Date.now() - 3_600_000);
  const fields = {
    from: input({ type: "datetime-local", value: local(hour), required: true }),
    to: input({ type: "datetime-local", value: local(new Date(Date.now() + 60_000)), required: true }),
    aggregate_type: input({ options: [["", "everything"], "order", "inventory", "stock_adjustment"] }),
    consumer: input({ options: [["", "all consumers"], ...consumers] }),
  };
  const result = h("div", { role: "status" });
  const wanted = () => {
    const body = { from: new Date(fields.from.value).toISOString(), to: new Date(fields.to.value).toISOString() };
    if (fields.aggregate_type.value) body.aggregate_type = fields.aggregate_type.value;
    if (fields.consumer.value) body.consumer = fields.consumer.value;
    return body;
  };
  const guarded = (work) => async () => {
    try {
      await work();
    } catch (error) {
      put(result, failure(error, "replays"));
    }
  };
  return h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
    labelled("From", fields.from), labelled("To", fields.to), labelled("About", fields.aggregate_type), labelled("To whom", fields.consumer),
    act("Try it first", guarded(async () => {
      const found = await post("/v1/replays", { ...wanted(), dry_run: true });
      put(result, h("p", {}, `${plural(found.total ?? found.count ?? 0, "event")} would be sent again.`));
    })),
    act("Start", guarded(async () => {
      await post("/v1/replays", wanted());
      toast("Started. Progress is below.");
    }), { class: "primary" }),
    result);
}

/** As the field wants it: local time, to the minute. */
function local(moment) {
  const shifted = new Date(moment.getTime() - moment.getTimezoneOffset() * 60_000);
  return shifted.toISOString().slice(0, 16);
}
