// Dead letters: messages given up on, by kind and one by one, and the way back for them.

import { get, path, post, query } from "../api.js";
import { h, isHeld, put, redraw } from "../dom.js";
import { ago, count, eventName, plural, time } from "../format.js";
import { proposeRedrive } from "../jobs.js";
import * as live from "../live.js";
import { follow, list } from "../list.js";
import { act, ask, badge, card, empty, failure, link, onActed, table, toast } from "../parts.js";
import { reasonInWords } from "../reasons.js";
import { hasLab } from "../session.js";

export default {
  title: "Dead letters",
  draw: (context) => [
    h("h1", {}, "Dead letters"),
    h("p", { class: "lead" }, "Messages that could not be dealt with, with their bytes and the reason. Nothing is ever dropped: mend the cause and redrive, or discard with a reason. What was sent back in bulk is under ", link("/redrives", "redrives"), "."),
    groups(context),
    list({
      endpoint: "/v1/dead-letters",
      what: "dead letters",
      sections: ["queues"],
      filters: [
        { name: "state", label: "State", options: ["", "open", "redriven", "discarded"] },
        { name: "consumer", label: "Consumer", options: ["", ...live.consumers(context.query.get("consumer"))] },
        { name: "reason", label: "Reason" },
        { name: "event_type", label: "Event type" },
        { name: "correlation_id", label: "Correlation id" },
        { name: "redrive", label: "Sent by redrive" },
      ],
      nothing: empty("No dead letters.", "That is as it should be. ", hasLab() ? ["Make one in ", link("/lab", "the fault lab"), " to see what happens."] : "With serve --demo the fault lab can make one."),
      columns: [
        { head: "Reason", cell: (row) => link(`/dead-letters/${row.id}`, row.reason) },
        { head: "State", cell: (row) => badge(row.state) },
        { head: "Consumer", cell: (row) => row.consumer },
        { head: "Event", cell: (row) => eventName(row.event_type) },
        { head: "Error", class: "wide", cell: (row) => row.error },
        { head: "Attempts", class: "number", cell: (row) => count(row.attempts) },
        { head: "Filed", cell: (row) => time(row.created_at) },
      ],
    }, context),
  ],
};

/** The same trouble many times over is one trouble. */
function groups({ signal }) {
  const body = h("div", {});
  const look = async () => {
    try {
      const { data } = await get("/v1/dead-letters/groups?state=open", signal);
      redraw(body, data.length ? table("Open dead letters by kind", [
        { head: "Reason", cell: (row) => link(`/dead-letters${query(criteria(row))}`, row.reason) },
        { head: "In words", class: "wide", cell: (row) => reasonInWords(row.reason) },
        { head: "Consumer", cell: (row) => row.consumer },
        { head: "Event", cell: (row) => eventName(row.event_type) },
        { head: "Count", class: "number", cell: (row) => count(row.count) },
        { head: "Last seen", cell: (row) => ago(row.last_seen_at) },
        { head: "Action", cell: (row) => h("span", { class: "row" },
          act("Redrive…", () => redrive(row), { class: "small", "aria-label": `Redrive all ${row.reason} of ${row.consumer}` }),
          act("Discard…", () => discard(row), { class: "small danger", "aria-label": `Discard all ${row.reason} of ${row.consumer}` })) },
      ], data) : h("p", { class: "quiet" }, "None is open."));
    } catch (error) {
      if (error.name !== "AbortError") put(body, failure(error, "groups of dead letters"));
    }
  };
  look();
  onActed(signal, look);
  follow(["queues"], signal, () => isHeld(body) || look());
  return card("Open, by kind", { id: "groups" }, body);
}

function criteria(row) {
  return { consumer: row.consumer, reason: row.reason, event_type: row.event_type, state: "open" };
}

/** More letters than this are worth a filter of their own. */
const BY_ID_MAX = 1000;

/** The ids of the letters of a kind. Asked for one by one, because no filter finds those whose type cannot be read. */
async function idsOf(kind) {
  const ids = [];
  let cursor = null;
  do {
    const page = await get(`/v1/dead-letters${query({ ...criteria(kind), limit: 200, cursor })}`);
    ids.push(...page.data.filter((letter) => letter.event_type === kind.event_type).map((letter) => letter.id));
    cursor = page.next_cursor;
  } while (cursor && ids.length < BY_ID_MAX);
  return ids.slice(0, BY_ID_MAX);
}

async function redrive(kind) {
  const { consumer, reason, event_type } = kind;
  await proposeRedrive(event_type ? { consumer, reason, event_type } : { ids: await idsOf(kind) }, `Redrive ${reason} of ${consumer}`);
}

async function discard(kind) {
  const ids = await idsOf(kind);
  ask({
    title: `Discard ${kind.reason} of ${kind.consumer}`,
    words: `${plural(ids.length, "letter")} will not be dealt with. They are kept, and can be restored until their time is up.`,
    confirm: `Discard ${plural(ids.length, "letter")}`,
    danger: true,
    fields: [{ name: "reason", label: "Why", value: "", required: true, maxlength: 200 }],
    async work({ reason }) {
      for (const id of ids) await post(path`/v1/dead-letters/${id}/discard`, { reason });
      toast(`${plural(ids.length, "letter")} discarded. `, link(`/dead-letters${query({ ...criteria(kind), state: "discarded" })}`, "See them"), ".");
    },
  });
}
