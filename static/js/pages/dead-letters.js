// Dead letters: messages given up on, by kind and one by one, and the way back for them.

import { get, post, query } from "../api.js";
import { h, isHeld, put } from "../dom.js";
import { ago, count, plural, time } from "../format.js";
import * as live from "../live.js";
import { follow, list } from "../list.js";
import { act, ask, badge, card, empty, failure, link, table, toast } from "../parts.js";
import { reasonInWords } from "../reasons.js";
import { jobs } from "../jobs.js";

export default {
  title: "Dead letters",
  draw: (context) => [
    h("h1", {}, "Dead letters"),
    h("p", { class: "lead" }, "Messages that could not be dealt with, with their bytes and the reason. Nothing is ever dropped: mend the cause and redrive, or discard with a reason."),
    groups(context),
    list({
      endpoint: "/v1/dead-letters",
      what: "dead letters",
      sections: ["queues"],
      filters: [
        { name: "state", label: "State", options: ["", "open", "redriven", "discarded"] },
        { name: "consumer", label: "Consumer" },
        { name: "reason", label: "Reason" },
        { name: "event_type", label: "Event type" },
      ],
      nothing: empty("No dead letters.", "That is as it should be. ", live.picture.server?.demo ? ["Make one in ", link("/lab", "the fault lab"), " to see what happens."] : "With serve --demo the fault lab can make one."),
      columns: [
        { head: "Reason", cell: (row) => link(`/dead-letters/${row.id}`, row.reason) },
        { head: "State", cell: (row) => badge(row.state) },
        { head: "Consumer", cell: (row) => row.consumer },
        { head: "Event", cell: (row) => row.event_type ?? "unreadable" },
        { head: "Error", class: "wide", cell: (row) => row.error },
        { head: "Attempts", class: "number", cell: (row) => count(row.attempts) },
        { head: "Filed", cell: (row) => time(row.created_at) },
      ],
    }, context),
    jobs("/v1/redrives", "redrives", context.signal),
  ],
};

/** The same trouble many times over is one trouble. */
function groups({ signal }) {
  const body = h("div", {});
  const element = card("By kind", { id: "groups" }, body);
  const look = async () => {
    try {
      const { data } = await get("/v1/dead-letters/groups?state=open", signal);
      if (isHeld(body)) return;
      put(body, data.length ? table("Open dead letters by kind", [
        { head: "Reason", cell: (row) => link(`/dead-letters${query(criteria(row))}`, row.reason) },
        { head: "In words", class: "wide", cell: (row) => reasonInWords(row.reason) },
        { head: "Consumer", cell: (row) => row.consumer },
        { head: "Event", cell: (row) => row.event_type ?? "unreadable" },
        { head: "Count", class: "number", cell: (row) => count(row.count) },
        { head: "Last seen", cell: (row) => ago(row.last_seen_at) },
        { head: "Action", cell: (row) => h("span", { class: "row" }, act("Redrive…", () => redrive(row), { class: "small", "aria-label": `Redrive all ${row.reason} of ${row.consumer}` })) },
      ], data) : h("p", { class: "quiet" }, "None is open."));
    } catch (error) {
      // A server without groups takes the word for an id: the list below says it all there.
      if (error.status === 404) element.hidden = true;
      else if (error.name !== "AbortError") put(body, failure(error, "groups of dead letters"));
    }
  };
  look();
  follow(["queues"], signal, look);
  return element;
}

function criteria(row) {
  return { consumer: row.consumer, reason: row.reason, event_type: row.event_type, state: "open" };
}

/** A dry run first; what it finds is shown before anything is sent. */
async function redrive({ consumer, reason, event_type }) {
  const filter = { consumer, reason, ...(event_type ? { event_type } : {}) };
  const found = await post("/v1/redrives", { ...filter, dry_run: true });
  ask({
    title: `Redrive ${reason} of ${consumer}`,
    words: dryRun(found),
    confirm: "Redrive them",
    fields: [
      { name: "rate", label: "At most this many a second", type: "number", min: 1, value: "50", required: true },
      { name: "reason", label: "Why", value: "", maxlength: 200, hint: "Optional; kept in the record of actions." },
    ],
    async work({ rate, reason: why }) {
      await post("/v1/redrives", { ...filter, rate: Number(rate), ...(why ? { why } : {}) });
      toast("On their way. Progress is below.");
    },
  });
}

export function dryRun(found) {
  const total = found.total ?? found.count ?? 0;
  const parts = [`Trying it without doing it: ${plural(total, "letter")} would be sent back.`];
  if (found.already_applied) parts.push(`${plural(found.already_applied, "one", "of them")} turned out to be done already and will only be closed.`);
  if (found.refused) parts.push(`${count(found.refused)} cannot be sent back and will be left alone.`);
  return parts.join(" ");
}

