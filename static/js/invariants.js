// The promises, checked: from the live picture where the server puts them there, else asked for now and then.

import { get, Problem } from "./api.js";
import { h, put } from "./dom.js";
import { ago } from "./format.js";
import * as live from "./live.js";
import { link } from "./parts.js";

const ASK_EVERY_MS = 15_000;

/** The strip of promises under the picture. */
export function strip(signal) {
  const element = h("section", { class: "promises card", id: "invariants", "aria-label": "Promises kept" });
  const draw = (audit) => put(element,
    h("h2", {}, link("/audit", audit.violations ? "Promises broken" : "Promises kept")),
    h("ul", {}, audit.checks.map((check) => h("li", { class: check.violations ? "bad" : "ok" },
      h("span", { "aria-hidden": "true" }, check.violations ? "✕ " : "✓ "),
      check.name.replaceAll("_", " ").replaceAll("-", " "), check.violations ? `: ${check.violations}` : h("span", { class: "unseen" }, " holds")))),
    h("p", { class: "quiet" }, "checked ", ago(audit.checked_at)));
  put(element, h("h2", {}, "Promises"), h("p", { class: "quiet" }, "Checking…"));
  keep(signal, draw, (error) => put(element, h("h2", {}, "Promises"),
    h("p", { class: "quiet" }, error instanceof Problem && error.isUnknownHere ? "This server does not check its promises itself." : "The promises cannot be checked just now.")));
  return element;
}

/** Calls `draw` with the audit now and whenever there is a new one. */
function keep(signal, draw, fail) {
  let timer = null;
  const ask = async () => {
    if (live.picture.audit) return;
    try {
      if (!document.hidden && !live.isPaused()) draw(await get("/v1/audit", signal));
    } catch (error) {
      if (error.name === "AbortError") return;
      fail(error);
      if (error instanceof Problem && error.isUnknownHere) return;
    }
    timer = setTimeout(ask, ASK_EVERY_MS);
  };
  live.watch((names) => {
    if (names.includes("audit")) draw(live.picture.audit);
  }, signal);
  signal.addEventListener("abort", () => clearTimeout(timer));
  if (live.picture.audit) draw(live.picture.audit);
  else if (live.picture.server) ask();
  else live.watch(once(ask), signal); // the first picture may bring it
}

function once(work) {
  let done = false;
  return (names) => {
    if (!done && names.length) {
      done = true;
      work();
    }
  };
}
