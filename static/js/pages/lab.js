// The fault lab: bad days to order. Only where the server was started with --demo.

import { get, path, post } from "../api.js";
import { DEMOS } from "../demos.js";
import { h, put, say } from "../dom.js";
import { plural } from "../format.js";
import { strip } from "../invariants.js";
import * as live from "../live.js";
import { act, badge, empty, failure, input, labelled, link, sentence, toast } from "../parts.js";
import { KINDS, administer } from "../poison.js";

export default {
  title: "Fault lab",
  forPlatform: true,
  draw({ signal }) {
    const body = h("div", { "aria-busy": "true" });
    let open = null;
    const update = async () => {
      const demo = live.picture.server?.demo;
      if (demo === undefined || demo === open) return;
      open = demo;
      put(body, demo ? lab(await get("/v1/lab", signal), signal) : empty("This server does not have the fault lab.", "It is for trying things out, and closed unless asked for: start the server with ", h("code", {}, "stockade serve --demo"), " on a loopback address."));
      body.removeAttribute("aria-busy");
    };
    const look = () => update().catch((error) => {
      open = null; // the next picture may find the server back
      if (error.name !== "AbortError") put(body, failure(error, "the fault lab"));
    });
    live.watch(look, signal);
    look();
    return [h("h1", {}, "Fault lab"), body];
  },
};

function lab({ crash_points: points }, signal) {
  return [
    h("div", { class: "warning", role: "note" }, h("strong", {}, "This breaks things on purpose. "), "Each fault says what it does and what should happen. The promises must hold throughout."),
    h("div", { class: "bench" },
      h("div", { class: "beside" }, armed(signal), strip(signal)),
      h("div", { class: "trials" },
        h("h2", {}, "Demos"),
        h("p", { class: "lead" }, "Each does its steps and ticks them off as what it promises is seen."),
        h("div", { class: "cards" }, DEMOS.map((demo) => checklist(demo, signal))),
        h("h2", {}, "Faults"),
        h("div", { class: "cards" }, faults(live.consumers(), points)))),
  ];
}

/** What is armed just now, and a way to take it back. */
function armed(signal) {
  const words = h("p", {});
  const undo = act("Take everything back", async () => {
    await post("/v1/lab/reset");
    for (const queue of live.picture.queues.filter((known) => known.paused)) await post(path`/v1/consumers/${live.shortName(queue)}/resume`);
  }, { class: "small" });
  const element = h("section", { class: "card armed", "aria-label": "Armed faults" }, words, undo);
  const update = () => {
    const faults = live.picture.server?.faults;
    if (!faults) return;
    const parts = [];
    if (faults.crash) parts.push(`the process dies at ${faults.crash.point}${faults.crash.consumer ? ` of ${faults.crash.consumer}` : ""}`);
    for (const [name, left] of Object.entries(faults.fail)) parts.push(`${plural(left, "event")} of ${name} will fail`);
    for (const [name, ms] of Object.entries(faults.slow_ms)) parts.push(`${name} takes ${ms} ms over each event`);
    for (const [name, { deliveries, copies }] of Object.entries(faults.duplicate)) parts.push(`${plural(deliveries, "delivery", "deliveries")} to ${name} will come ${plural(copies, "time")} more`);
    for (const queue of live.picture.queues ?? []) if (queue.paused) parts.push(`${live.shortName(queue)} is paused`);
    say(words, parts.length ? `Armed: ${parts.join("; ")}.` : "Nothing is armed.");
    element.classList.toggle("is-armed", parts.length > 0);
    undo.hidden = parts.length === 0;
  };
  live.watch(update, signal);
  update();
  return element;
}

function checklist(demo, signal) {
  const items = demo.steps.map(([words]) => ({ mark: h("span", { class: "tick", "aria-hidden": "true" }, "○"), note: h("span", { class: "quiet" }), words }));
  const rows = items.map((item) => h("li", { class: "todo" }, item.mark, h("span", {}, item.words, " ", item.note)));
  const outcome = h("p", { class: "outcome", role: "status" });
  const start = act("Start", async () => {
    put(outcome);
    items.forEach((item, index) => {
      rows[index].className = "todo";
      say(item.mark, "○");
      say(item.note, "");
    });
    const run = { signal };
    const mend = () => demo.mend?.().catch(() => {});
    // Whoever leaves in the middle of it leaves nothing broken behind.
    addEventListener("pagehide", mend);
    try {
      await go(run, mend);
    } finally {
      removeEventListener("pagehide", mend);
    }
  }, { class: "primary", "aria-label": `Start the demo: ${demo.title}` });
  const go = async (run, mend) => {
    for (const [index, [, work]] of demo.steps.entries()) {
      rows[index].className = "doing";
      say(items[index].mark, "◌");
      try {
        say(items[index].note, (await work(run)) ?? "");
        rows[index].className = "done";
        say(items[index].mark, "✓");
      } catch (error) {
        if (error.name === "AbortError") return mend();
        rows[index].className = "failed";
        say(items[index].mark, "✕");
        say(items[index].note, sentence(error));
        put(outcome, badge("not proven", "bad"));
        return mend();
      }
    }
    put(outcome, badge("proven", "ok"));
  };
  return h("section", { class: "card demo", id: `demo-${demo.name}` }, h("h3", {}, demo.title), h("p", {}, demo.about),
    h("ol", { class: "checklist" }, rows), h("div", { class: "row" }, start, outcome));
}

/** A fault: what it does, what should happen, and the values it takes. */
function fault({ name, title, does, expect, fields = [], label = "Do it", work }) {
  const inputs = fields.map((field) => [field, input(field)]);
  return h("section", { class: "card fault", id: `fault-${name}` },
    h("h3", {}, title),
    h("p", {}, does),
    h("p", { class: "expect" }, h("strong", {}, "What should happen: "), expect),
    inputs.length > 0 && h("div", { class: "filters" }, inputs.map(([field, element]) => labelled(field.label, element))),
    h("div", { class: "row" }, act(label, () => work(Object.fromEntries(inputs.map(([field, element]) => [field.name, element.value]))), { "aria-label": `${label}: ${title}` })));
}

function faults(consumers, points) {
  const consumer = { name: "consumer", label: "Consumer", options: consumers, value: consumers.includes("inventory") ? "inventory" : consumers[0] };
  const number = (name, label, value, max) => ({ name, label, type: "number", min: 1, max, value });
  return [
    fault({
      name: "duplicate", title: "Duplicate", does: "Lets the next deliveries to a consumer come again, as any broker may.",
      expect: "each copy is dismissed; “duplicates suppressed” climbs, stock and notices do not.",
      fields: [consumer, number("deliveries", "Deliveries", "1", 1000), number("copies", "Times more", "2", 1000)],
      label: "Arm", work: ({ consumer: name, deliveries, copies }) => post("/v1/lab/duplicate", { consumer: name, deliveries: Number(deliveries), copies: Number(copies) }),
    }),
    fault({
      name: "poison", title: "Poison", does: "Puts a message that nobody can read into the queue of inventory.",
      expect: "it becomes a dead letter with its bytes and the reason; the consumer goes on.",
      fields: [{ name: "kind", label: "Kind", options: [["all", "one of each"], ...KINDS.map((kind, index) => [String(index), kind.what])], value: "0" }],
      label: "Send", async work({ kind }) {
        for (const dose of kind === "all" ? KINDS : [KINDS[Number(kind)]]) await administer(dose);
        toast("Sent. ", link("/dead-letters", "See the dead letters"), ".");
      },
    }),
    fault({
      name: "slow", title: "Slow consumer", does: "Lets a consumer take its time over each event, one after the other.",
      expect: "its queue grows and its oldest message ages; nobody else is held up. 0 makes it fast again.",
      fields: [consumer, { name: "ms", label: "Milliseconds", type: "number", min: 0, max: 10_000, value: "500" }],
      label: "Slow down", work: ({ consumer: name, ms }) => post("/v1/lab/slow", { consumer: name, ms: Number(ms) }),
    }),
    fault({
      name: "fail", title: "Failing handler", does: "Lets the next events of a consumer fail for now.",
      expect: "each is retried with growing pauses and succeeds in the end; more than eight in a row for one event make it a dead letter.",
      fields: [consumer, number("times", "Events", "3", 1000)],
      label: "Arm", work: ({ consumer: name, times }) => post("/v1/lab/fail", { consumer: name, times: Number(times) }),
    }),
    fault({
      name: "pause", title: "Pause", does: "Lets a consumer rest until it is resumed, on every instance.",
      expect: "orders are taken all the same; its queue grows, and drains when it is back.",
      fields: [consumer, { name: "road", label: "Do", options: ["pause", "resume"], value: "pause" }],
      label: "Do it", work: ({ consumer: name, road }) => post(path`/v1/consumers/${name}/${road}`),
    }),
    fault({
      name: "crash", title: "Crash", does: "Ends the process the next time it gets to this point, as kill -9 would.",
      expect: "the page loses the server. Start it again: nothing is lost, nothing is done twice.",
      fields: [{ name: "point", label: "Point", options: points.map(({ point, meaning }) => [point, `${point}: ${meaning}`]), value: "consumer.after_commit" }, { ...consumer, options: [["", "any"], ...consumers], value: "" }],
      label: "Arm", work: ({ point, consumer: name }) => post("/v1/lab/crash", name && point.startsWith("consumer.") ? { point, consumer: name } : { point }),
    }),
    fault({
      name: "backlog", title: "Backlog", does: "Places many orders of one WIDGET-A each, as fast as the page can.",
      expect: "each is answered; what the shelf cannot fill is rejected with the reason. Pause inventory first to see the queue climb.",
      fields: [number("orders", "Orders", "200", 5000)],
      label: "Place them", async work({ orders }) {
        const wanted = Math.min(5000, Number(orders));
        let placed = 0;
        const lane = async () => {
          while (placed < wanted) {
            placed += 1;
            await post("/v1/orders", { customer_id: "backlog", items: [{ sku: "WIDGET-A", quantity: 1, unit_price_minor: 100 }] });
          }
        };
        await Promise.all(Array.from({ length: 6 }, lane));
        toast(`${plural(wanted, "order")} placed and answered.`);
      },
    }),
  ];
}

