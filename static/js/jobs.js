// Redrives and replays: a dry run before anything is sent, then progress, and a way to stop them.

import { post, query } from "./api.js";
import { h } from "./dom.js";
import { count, eventName, plural, time } from "./format.js";
import { list } from "./list.js";
import * as live from "./live.js";
import { act, ask, badge, input, labelled, link, table, toast } from "./parts.js";

/** The list of jobs at an endpoint. */
export function jobs({ endpoint, what, nothing, letters = false }, context) {
  return list({
    endpoint,
    what,
    nothing,
    filters: [{ name: "state", label: "State", options: ["", "running", "done", "stopped", "failed"] }],
    sections: ["queues"],
    isMoving: (rows) => rows.some((job) => job.state === "running"),
    columns: [
      { head: "State", cell: (job) => badge(job.state) },
      { head: "What", class: "wide", cell: (job) => (letters ? link(`/dead-letters${query({ redrive: job.id })}`, asked(job.filter)) : asked(job.filter)) },
      { head: "Progress", class: "wide", cell: progress },
      { head: "A second", class: "number", cell: (job) => count(job.rate) },
      { head: "By", class: "wide", cell: (job) => [job.who, job.why && h("span", { class: "quiet" }, `: ${job.why}`)] },
      { head: "Started", cell: (job) => time(job.created_at) },
      { head: "Finished", cell: (job) => time(job.finished_at) },
      { head: "Action", cell: (job) => job.state === "running" && act("Stop", async () => {
        await post(`${endpoint}/${job.id}/stop`);
        toast("Stopped. What was not sent stays as it was.");
      }, { class: "small" }) },
    ],
  }, context);
}

function progress(job) {
  const done = job.sent + job.already_applied + job.skipped + job.refused;
  const parts = [[job.already_applied, "applied already"], [job.skipped, "resolved meanwhile"], [job.refused, "too old"]].filter(([number]) => number > 0);
  return [
    h("span", { class: "meter" }, h("progress", { max: String(Math.max(1, job.total)), value: String(done), "aria-label": "progress" }), ` ${count(job.sent)} of ${count(job.total)} sent`),
    parts.length > 0 && h("div", { class: "quiet" }, parts.map(([number, words]) => `${count(number)} ${words}`).join(", ")),
    job.last_error && h("div", { class: "note" }, job.last_error),
  ];
}

/** What a job was asked for, in words. */
function asked(filter) {
  const set = Object.entries(filter).filter(([, value]) => value !== null && value !== "" && !(Array.isArray(value) && !value.length));
  return set.map(([name, value]) => `${name.replaceAll("_", " ")} ${Array.isArray(value) ? plural(value.length, "letter") : value}`).join(", ") || "everything";
}

const HOW = [
  { name: "rate", label: "At most this many a second", type: "number", min: 1, max: 10_000, value: "50", required: true },
  { name: "why", label: "Why", value: "", maxlength: 200, hint: "Optional; kept in the record of actions." },
];

function how({ rate, why }) {
  return { rate: Number(rate), ...(why ? { why } : {}) };
}

/** Says what a redrive of these letters would do, and does it if that is wanted. */
export async function proposeRedrive(filter, title) {
  const found = await post("/v1/redrives", { ...filter, dry_run: true });
  ask({
    title,
    words: [prospect(found), found.groups.length > 1 && groups(found.groups)],
    ...(found.total > 0 ? { confirm: `Redrive ${plural(found.total, "letter")}`, fields: HOW } : {}),
    async work(values) {
      await post("/v1/redrives", { ...filter, ...how(values) });
      toast("On their way. ", link("/redrives", "See the progress"), ".");
    },
  });
}

/** A dry run of a redrive in words. */
export function prospect({ total, already_applied, refused }) {
  const parts = [`Tried without doing it: ${plural(total, "letter")} found.`];
  const sent = total - already_applied - refused;
  if (sent > 0) parts.push(`${count(sent)} would go back to ${sent === 1 ? "its queue" : "their queues"}, the same bytes under the same ids. Unless what refused them has changed, they will be refused again.`);
  if (already_applied) parts.push(`${count(already_applied)} turned out to be done since and would only be closed.`);
  if (refused) parts.push(`${count(refused)} ${refused === 1 ? "is" : "are"} too old to be sent in bulk and would stay.`);
  return parts.join(" ");
}

function groups(rows) {
  return table("What was found", [
    { head: "Consumer", cell: (row) => row.consumer },
    { head: "Reason", cell: (row) => row.reason },
    { head: "Event", cell: (row) => eventName(row.event_type) },
    { head: "Count", class: "number", cell: (row) => count(row.count) },
  ], rows);
}

/** The same for a replay of published events. */
export async function proposeReplay(filter) {
  const found = await post("/v1/replays", { ...filter, dry_run: true });
  ask({
    title: "Replay",
    words: [
      found.total ? `Tried without doing it: ${plural(found.total, "event")} would be sent again${found.consumer ? ` to ${found.consumer}` : ""}. What was done already is known by the inbox and skipped.`
        : "Tried without doing it: nothing was published then that this finds.",
      found.by_type.length > 0 && table("What was found", [
        { head: "Event", cell: (row) => row.event_type },
        { head: "Count", class: "number", cell: (row) => count(row.count) },
      ], found.by_type),
    ],
    ...(found.total > 0 ? { confirm: `Replay ${plural(found.total, "event")}`, fields: HOW } : {}),
    async work(values) {
      await post("/v1/replays", { ...filter, ...how(values) });
      toast("Started. Its progress is in the list.");
    },
  });
}

/** A form that chooses messages by kind and time. Fields by name, as `input` takes them; `options: "consumers"` offers those. `values()` tells those that are set. */
export function filterForm(fields, ...buttons) {
  const inputs = Object.entries(fields).map(([name, field]) => {
    const options = field.options === "consumers" ? [["", field.any ?? "any"], ...live.consumers()] : field.options;
    const value = field.value instanceof Date ? local(field.value) : field.value;
    return [name, field, input({ ...field, name, options, value })];
  });
  const element = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
    inputs.map(([, field, box]) => labelled(field.label, box)), buttons);
  return {
    element,
    values() {
      const set = inputs.filter(([, , box]) => box.value.trim());
      return Object.fromEntries(set.map(([name, field, box]) => [name, field.type === "datetime-local" ? new Date(box.value).toISOString() : box.value.trim()]));
    },
  };
}

/** As the field wants it: local time, to the minute. */
function local(moment) {
  const shifted = new Date(moment.getTime() - moment.getTimezoneOffset() * 60_000);
  return shifted.toISOString().slice(0, 16);
}
