// The audit: each promise, whether it holds, and the rows that break it. And who did what.

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { count, plural, time } from "../format.js";
import { list } from "../list.js";
import { act, badge, card, empty, failure, table, verbatim } from "../parts.js";

export default {
  title: "Audit",
  draw(context) {
    const body = h("div", {}, h("p", { class: "quiet" }, "Checking every promise…"));
    const look = async () => {
      try {
        const audit = await get("/v1/audit", context.signal);
        put(body, verdict(audit), checks(audit));
      } catch (error) {
        if (error.name !== "AbortError") put(body, failure(error, "the audit"));
      }
    };
    look();
    return [
      h("div", { class: "row top" }, h("h1", {}, "Audit"), act("Check again", look)),
      h("p", { class: "lead" }, "What must hold whatever crashes, repeats or arrives out of order, asked of the database itself."),
      body,
      h("h2", {}, "Who did what"),
      list({
        endpoint: "/v1/actions",
        what: "the record of actions",
        sections: ["queues"],
        nothing: empty("Nobody has done anything yet.", "Pauses, redrives, discards and replays are recorded here, with who and why."),
        columns: [
          { head: "When", cell: (row) => time(row.created_at) },
          { head: "Who", cell: (row) => row.who },
          { head: "What", cell: (row) => row.action },
          { head: "On", class: "wide", cell: (row) => row.subject },
          { head: "Why", class: "wide", cell: (row) => row.why ?? "" },
        ],
      }, context),
    ];
  },
};

function verdict(audit) {
  const good = audit.violations === 0;
  return h("div", { class: "headline", "data-tone": good ? "ok" : "bad" },
    h("span", { class: "big-mark", "aria-hidden": "true" }, good ? "✓" : "✕"),
    h("div", {}, h("p", { class: "sentence" }, good ? "Every promise holds." : `${plural(audit.violations, "violation")}.`),
      h("p", { class: "advice" }, "Checked at ", time(audit.checked_at), ".")));
}

function checks(audit) {
  return card("Promises", {}, table("Promises", [
    { head: "Promise", cell: (check) => h("strong", {}, check.name.replaceAll("_", " ").replaceAll("-", " ")) },
    { head: "Result", cell: (check) => (check.violations ? badge(`${count(check.violations)} broken`, "bad") : badge("holds", "ok")) },
    { head: "What it says", class: "wide", cell: (check) => check.description ?? check.promise ?? "" },
    { head: "Rows", class: "wide", cell: (check) => (check.violations ? verbatim(JSON.stringify(check.sample, null, 2), { label: `Rows that break ${check.name}` }) : "") },
  ], audit.checks));
}
