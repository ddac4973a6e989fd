// Messages that nobody can read, one of each kind, and the reason that the dead letter of each must give.

import { find, path, post } from "./api.js";

/** The tenant of a server without keys, which is the only kind that has a fault lab. */
const GROUP = "00000000-0000-0000-0000-000000000001";

function orderEvent(event_type, payload, order_id = crypto.randomUUID()) {
  return {
    event_id: crypto.randomUUID(),
    occurred_at: new Date().toISOString(),
    aggregate_type: "order",
    aggregate_id: order_id,
    event_type,
    group_id: GROUP,
    correlation_id: `lab-${order_id.slice(0, 8)}`,
    payload: { order_id, ...payload },
  };
}

const orderPlaced = () => orderEvent("placed", { order_number: "EXT-LAB", customer_id: "lab", currency: "USD", total_minor: 0, items: [{ sku: "WIDGET-A", quantity: 1, unit_price_minor: 0 }] });

const message = (event) => ({ message_id: event.event_id, body: JSON.stringify(event) });

function changed(change) {
  return () => {
    const event = orderPlaced();
    const { message_id } = message(event);
    change(event);
    return [{ message_id, body: JSON.stringify(event) }];
  };
}

/** Kinds of poison: what it is in words, the reason it ends with, and how to make one. The last message is the dose. */
export const KINDS = [
  { what: "broken JSON", reason: "not-json", make: () => [{ body: '{"event_id": "0190a000-0000-7000-8000-000000000001", "payload": {' }] },
  { what: "bytes that are no text", reason: "not-utf8", make: () => [{ body_base64: btoa("\xff\xfe\x00order") }] },
  { what: "far too large", reason: "too-large", make: () => [{ body: `{"padding": "${"x".repeat(300_000)}"}` }] },
  { what: "nested a hundred deep", reason: "too-deep", make: () => [{ body: "[".repeat(100) + "]".repeat(100) }] },
  { what: "no event id", reason: "no-id", make: changed((event) => { event.event_id = null; }) },
  { what: "two ids that differ", reason: "id-mismatch", make: () => [{ ...message(orderPlaced()), message_id: crypto.randomUUID() }] },
  { what: "an unknown event", reason: "unknown-type", make: changed((event) => { event.event_type = "teleported"; }) },
  { what: "a payload without items", reason: "schema", make: changed((event) => { delete event.payload.items; }) },
  { what: "a quantity that is no number", reason: "schema", make: changed((event) => { event.payload.items[0].quantity = "two"; }) },
  { what: "an event from years ago", reason: "too-old", make: changed((event) => { event.occurred_at = "2001-02-03T04:05:06Z"; }) },
  { what: "an id used before, for another body", reason: "id-reused", make: reused },
  { what: "a payment of what was cancelled", reason: "business-rule", make: contradiction },
];

/** A good event first; then another one under its id. */
function reused() {
  const first = orderPlaced();
  return [message(first), message({ ...orderPlaced(), event_id: first.event_id })];
}

/** Two facts that cannot both be true. */
function contradiction() {
  const cancelled = orderEvent("cancelled", {});
  return [message(cancelled), message(orderEvent("paid", { customer_id: "lab", amount_minor: 500, currency: "USD" }, cancelled.aggregate_id))];
}

/** Puts one dose into the queue of inventory; returns its message id, by which its letter is known. */
export async function administer(kind) {
  const parts = kind.make();
  const dose = parts.pop();
  for (const part of parts) {
    await post("/v1/lab/publish", { queue: "inventory", ...part });
    await dealtWith(part.message_id);
  }
  const message_id = dose.message_id ?? crypto.randomUUID();
  await post("/v1/lab/publish", { queue: "inventory", ...dose, message_id });
  return message_id;
}

/** What a dose contradicts must be so before it comes: two messages of one batch have no order. */
async function dealtWith(event_id) {
  for (let tries = 0; tries < 50; tries += 1) {
    if ((await find(path`/v1/inbox/inventory/${event_id}`))?.state === "processed") return;
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  throw new Error("inventory does not deal with messages just now; is it paused?");
}
