// Actions: who did what, when and why.

import { h } from "../dom.js";
import { query } from "../api.js";
import { time } from "../format.js";
import { list } from "../list.js";
import { empty, link } from "../parts.js";

const WORDS = {
  "consumer.pause": "paused a consumer",
  "consumer.resume": "resumed a consumer",
  "dead-letter.discard": "discarded a letter",
  "dead-letter.redrive": "redrove a letter",
  "dead-letter.restore": "restored a letter",
  "outbox.retry": "sent from the outbox again",
  "redrive.start": "started a redrive",
  "redrive.stop": "stopped a redrive",
  "replay.start": "started a replay",
  "replay.stop": "stopped a replay",
};

export default {
  title: "Actions",
  draw: (context) => [
    h("h1", {}, "Actions"),
    h("p", { class: "lead" }, "What operators did, with who and why. Without API keys the name is the one that the caller gives itself, this browser by ", link("/settings", "its settings"), "."),
    list({
      endpoint: "/v1/actions",
      what: "actions",
      sections: ["queues", "server"],
      filters: [
        { name: "action", label: "What", options: [["", "anything"], ...Object.entries(WORDS)] },
        { name: "who", label: "Who" },
        { name: "subject", label: "On" },
      ],
      nothing: empty("Nobody has done anything yet.", "Pauses, redrives, discards and replays are recorded here. ", link("/queues", "Pause a consumer"), " to see one."),
      columns: [
        { head: "When", cell: (row) => time(row.created_at) },
        { head: "Who", cell: (row) => link(`/actions${query({ who: row.who })}`, row.who) },
        { head: "What", cell: (row) => WORDS[row.action] ?? row.action },
        { head: "On", class: "wide", cell: (row) => subject(row) },
        { head: "Why", class: "wide", cell: (row) => row.why ?? "" },
        { head: "Details", class: "wide", cell: (row) => details(row.details) },
      ],
    }, context),
  ],
};

function subject({ action, subject: id }) {
  if (action.startsWith("consumer.")) return link("/queues", id);
  if (action.startsWith("dead-letter.")) return link(`/dead-letters/${id}`, id);
  if (action.startsWith("redrive.")) return link(`/dead-letters${query({ redrive: id })}`, id);
  if (action.startsWith("replay.")) return link("/replays", id);
  return id;
}

function details(value) {
  const set = Object.entries(value.filter ? { ...value.filter, rate: value.rate } : value).filter(([, part]) => part !== null && !(Array.isArray(part) && !part.length));
  return set.map(([name, part]) => `${name.replaceAll("_", " ")} ${Array.isArray(part) ? part.length : part}`).join(", ");
}
