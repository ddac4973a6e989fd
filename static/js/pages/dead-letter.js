// One dead letter: why, what it said, and what can be done about it.

import { get, path, post } from "../api.js";
import { h } from "../dom.js";
import { count, eventName, time } from "../format.js";
import { prospect } from "../jobs.js";
import { act, ask, badge, card, complain, dump, facts, link, mono, table, toast, verbatim } from "../parts.js";
import { advice, reasonInWords } from "../reasons.js";
import { navigate, show } from "../router.js";
import { hidesPayloads } from "../theme.js";

export default {
  title: "Dead letter",
  async draw({ params, signal }) {
    const letter = await get(path`/v1/dead-letters/${params.id}`, signal);
    return [
      h("p", { class: "crumbs" }, link("/dead-letters", "Dead letters")),
      h("div", { class: "row top" }, h("h1", {}, `${letter.reason}: ${reasonInWords(letter.reason)}`), badge(letter.state)),
      h("p", { class: "lead" }, letter.state === "open" ? advice(letter.reason) : `It was ${letter.state}; nothing is left to do.`),
      actions(letter),
      h("div", { class: "two" },
        card("What happened", {}, facts([
          ["Error", h("span", { class: "breaks" }, letter.error)],
          ["Consumer", letter.consumer],
          ["Queue", letter.queue],
          ["Event type", eventName(letter.event_type)],
          ["Message id", mono(letter.message_id ?? "none")],
          ["Correlation id", mono(letter.correlation_id ?? "none")],
          ["Attempts", count(letter.attempts)],
          ["Filed", time(letter.created_at)],
        ])),
        card("How it got here", {}, deaths(letter))),
      payload(letter),
      card("Headers", {}, verbatim(JSON.stringify(letter.headers, null, 2), { label: "Headers", name: "headers.json" })),
      letter.actions?.length > 0 && card("Who did what", {}, table("Actions", [
        { head: "When", cell: (row) => time(row.created_at) },
        { head: "Who", cell: (row) => row.who },
        { head: "What", cell: (row) => row.action },
        { head: "Why", class: "wide", cell: (row) => row.why ?? "" },
      ], letter.actions)),
    ];
  },
};

function actions(letter) {
  if (letter.state === "discarded") {
    return h("div", { class: "row" }, act("Restore", async () => {
      await post(path`/v1/dead-letters/${letter.id}/restore`);
      toast("It is open again.");
      show();
    }));
  }
  if (letter.state !== "open") return null;
  return h("div", { class: "row" },
    act("Redrive…", () => redrive(letter), { class: "primary", id: "redrive" }),
    act("Discard…", () => discard(letter), { class: "danger", id: "discard" }));
}

/** What would happen, then the question. */
async function redrive(letter) {
  const found = await post("/v1/redrives", { ids: [letter.id], dry_run: true });
  ask({
    title: "Redrive this letter",
    words: prospect(found),
    confirm: "Redrive it",
    fields: [{ name: "reason", label: "Why", value: "", maxlength: 200, hint: "Optional; kept in the record of actions." }],
    async work({ reason }) {
      const { already_applied } = await post(path`/v1/dead-letters/${letter.id}/redrive`, reason ? { reason } : {});
      toast(already_applied ? "It had been dealt with already; the letter is closed and nothing was sent." : `On its way back to ${letter.queue}. If it fails again, a new letter appears.`);
      show().catch(complain);
    },
  });
}

function discard(letter) {
  ask({
    title: "Discard this letter",
    words: "It will not be dealt with. It is kept, and can be restored until its time is up.",
    confirm: "Discard it",
    danger: true,
    fields: [{ name: "reason", label: "Why", value: "", required: true, maxlength: 200 }],
    async work({ reason }) {
      await post(path`/v1/dead-letters/${letter.id}/discard`, { reason });
      toast("Discarded.");
      navigate(path`/dead-letters/${letter.id}`, { replace: true });
    },
  });
}

function payload(letter) {
  if (hidesPayloads()) {
    return card("Payload", {}, h("p", { class: "quiet" }, "Hidden, as you asked in ", link("/settings", "settings"), "."));
  }
  const [kind, shown] = letter.body_encoding === "base64"
    ? ["These bytes are no text; shown in hex.", dump(letter.body, { label: "Payload", name: `${letter.id}.bin` })]
    : ["As it came, byte for byte.", verbatim(letter.body, { label: "Payload", name: `${letter.id}.txt` })];
  return card("Payload", { id: "payload" }, h("p", { class: "quiet" }, kind), shown);
}

function deaths(letter) {
  const all = Array.isArray(letter.x_death) ? letter.x_death : [];
  if (!all.length) return h("p", { class: "quiet" }, "The broker told nothing of it.");
  return h("ol", { class: "story" }, all.map((death) => h("li", { class: "bad" },
    h("span", { class: "when" }, time(death.time)), h("div", {}, `${death.reason} by ${death.queue}`, death.count > 1 && `, ${count(death.count)} times`))));
}
