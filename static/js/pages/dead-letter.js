// One dead letter: why, what it said, and what can be done about it.

import { get, path, post } from "../api.js";
import { h } from "../dom.js";
import { count, time } from "../format.js";
import { act, ask, badge, card, complain, facts, hexdump, link, mono, table, toast, verbatim } from "../parts.js";
import { advice, reasonInWords } from "../reasons.js";
import { navigate, show } from "../router.js";

const HIDE = "stockade.hide-payloads";

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
          ["Event type", letter.event_type ?? "unreadable"],
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
  ask({
    title: "Redrive this letter",
    words: await prospects(letter),
    confirm: "Redrive it",
    async work() {
      const { already_applied } = await post(path`/v1/dead-letters/${letter.id}/redrive`);
      toast(already_applied ? "It had been dealt with already; the letter is closed and nothing was sent." : `On its way back to ${letter.queue}. If it fails again, a new letter appears.`);
      show().catch(complain);
    },
  });
}

async function prospects(letter) {
  const known = letter.message_id && await get(path`/v1/inbox/${letter.consumer}/${letter.message_id}`).catch(() => null);
  if (known?.state === "processed") return `${letter.consumer} has dealt with this event since: nothing would be sent, the letter would be closed.`;
  const same = "The same bytes go back to the same queue under the same id.";
  return known ? `${same} ${letter.consumer} would try it anew, with its attempts forgotten.` : `${same} Unless what reads them has changed, they will be refused again.`;
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
  if (localStorage.getItem(HIDE) === "yes") {
    return card("Payload", {}, h("p", { class: "quiet" }, "Hidden, as you asked in ", link("/settings", "settings"), "."));
  }
  const text = letter.body_encoding === "base64" ? hexdump(letter.body) : letter.body;
  const kind = letter.body_encoding === "base64" ? "These bytes are no text; shown in hex." : "As it came, byte for byte.";
  return card("Payload", { id: "payload" }, h("p", { class: "quiet" }, kind), verbatim(text, { label: "Payload", name: `${letter.id}.txt` }));
}

function deaths(letter) {
  const all = Array.isArray(letter.x_death) ? letter.x_death : [];
  if (!all.length) return h("p", { class: "quiet" }, "The broker told nothing of it.");
  return h("ol", { class: "story" }, all.map((death) => h("li", {},
    `${death.reason} by ${death.queue}`, death.count > 1 ? `, ${count(death.count)} times` : "", h("span", { class: "quiet" }, " ", time(death.time)))));
}
