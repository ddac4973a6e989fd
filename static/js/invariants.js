// The promises, as the last audit found them: beside whatever is tried.

import { get } from "./api.js";
import { h, put, redraw } from "./dom.js";
import { ago, plural } from "./format.js";
import * as live from "./live.js";
import { act, link } from "./parts.js";

/** "stock-conserved" as people say it. */
export function promiseInWords(name) {
  return name.replaceAll("-", " ");
}

/** The strip of promises. */
export function strip(signal) {
  const title = h("h2", {}, "Promises");
  const checks = h("ul", {});
  const when = h("p", { class: "quiet when" }, "Not checked yet.");
  const again = act("Check now", async () => draw(await get("/v1/audit", signal)), { class: "small", title: "Checks every row, not only those of late" });
  const element = h("section", { class: "promises card", id: "invariants", "aria-label": "Promises" }, title, checks, h("div", { class: "row" }, when, again));

  function draw(audit) {
    element.dataset.tone = audit.violations ? "bad" : "ok";
    redraw(title, link("/audit", audit.violations ? `${plural(audit.violations, "violation")} of promises` : `All ${audit.checks.length} promises kept`));
    put(checks, audit.checks.map((check) => h("li", { class: check.violations ? "bad" : "ok", title: check.promise },
      h("span", { "aria-hidden": "true" }, check.violations ? "✕ " : "✓ "),
      promiseInWords(check.name), check.violations ? `: ${check.violations}` : h("span", { class: "unseen" }, " holds"))));
    put(when, "checked ", ago(audit.checked_at));
  }

  live.watch((names) => {
    if (names.includes("audit") && live.picture.audit) draw(live.picture.audit);
  }, signal);
  if (live.picture.audit) draw(live.picture.audit);
  return element;
}
