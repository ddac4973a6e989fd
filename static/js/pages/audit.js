// The audit: each promise, whether it holds, and the rows that break it.

import { get } from "../api.js";
import { h, put } from "../dom.js";
import { count, plural, time } from "../format.js";
import { promiseInWords } from "../invariants.js";
import { act, badge, card, failure, table, verbatim } from "../parts.js";

export default {
  title: "Audit",
  forPlatform: true,
  draw({ signal }) {
    const body = h("div", { "aria-busy": "true" }, h("p", { class: "quiet" }, "Checking every promise on every row…"));
    const look = async () => {
      try {
        const audit = await get("/v1/audit", signal);
        put(body, verdict(audit), checks(audit));
      } catch (error) {
        if (error.name !== "AbortError") put(body, failure(error, "the audit"));
      } finally {
        body.removeAttribute("aria-busy");
      }
    };
    look();
    return [
      h("div", { class: "row top" }, h("h1", {}, "Audit"), act("Check again", look, { class: "primary" })),
      h("p", { class: "lead" }, "What must hold whatever crashes, repeats or arrives out of order, asked of the database itself: every row, at one moment. The server looks at rows of late by itself; ",
        h("code", {}, "stockade audit"), " asks the same from the command line."),
      body,
    ];
  },
};

function verdict(audit) {
  const good = audit.violations === 0;
  const unsettled = audit.unsettled ? `${plural(audit.unsettled, "message")} under way at that moment: no violation.` : "Nothing was under way.";
  return h("div", { class: "headline", "data-tone": good ? "ok" : "bad" },
    h("span", { class: "big-mark", "aria-hidden": "true" }, good ? "✓" : "✕"),
    h("div", {}, h("p", { class: "sentence" }, good ? `All ${audit.checks.length} promises hold.` : `${plural(audit.violations, "violation")}.`),
      h("p", { class: "advice" }, "Checked at ", time(audit.checked_at), ". ", unsettled)));
}

function checks(audit) {
  return card("Promises", {}, table("Promises", [
    { head: "Promise", cell: (check) => h("strong", {}, promiseInWords(check.name)) },
    { head: "Result", cell: (check) => (check.violations ? badge(`${count(check.violations)} broken`, "bad") : badge("holds", "ok")) },
    { head: "What it says", class: "wide", cell: (check) => check.promise },
  ], audit.checks),
  audit.checks.filter((check) => check.violations).map((check) => h("div", {},
    h("h3", {}, `Who breaks “${promiseInWords(check.name)}”`),
    verbatim(check.sample.join("\n"), { label: `Rows that break ${check.name}` }))));
}
