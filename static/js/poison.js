// Messages that nobody can read, one of each kind, and the reason that the dead letter of each must give.

import { post } from "./api.js";

/** The tenant of a server without keys, which is the only kind that has a fault lab. */
const GROUP = "00000000-0000-0000-0000-000000000001";

function orderPlaced(sku = "WIDGET-A", quantity = 1) {
  const order_id = crypto.randomUUID();
  return {
    event_id: crypto.randomUUID(),
    occurred_at: new Date().toISOString(),
    aggregate_type: "order",
    aggregate_id: order_id,
    event_type: "placed",
    group_id: GROUP,
    correlation_id: `lab-${order_id.slice(0, 8)}`,
    payload: { order_id, order_number: "EXT-LAB", customer_id: "lab", currency: "USD", total_minor: 0, items: [{ sku, quantity, unit_price_minor: 0 }] },
  };
}

function changed(change) {
  return () => {
    const event = orderPlaced();
    const message_id = event.event_id;
    change(event);
    return { message_id, body: JSON.stringify(event) };
  };
}

/** Kinds of poison: what it is in words, the reason it ends with, and how to make one. */
export const KINDS = [
  { what: "broken JSON", reason: "not-json", make: () => ({ body: '{"event_id": "0190a000-0000-7000-8000-000000000001", "payload": {' }) },
  { what: "bytes that are no text", reason: "not-utf8", make: () => ({ body_base64: btoa("\xff\xfe\x00order") }) },
  { what: "far too large", reason: "too-large", make: () => ({ body: `{"padding": "${"x".repeat(300_000)}"}` }) },
  { what: "nested a hundred deep", reason: "too-deep", make: () => ({ body: "[".repeat(100) + "]".repeat(100) }) },
  { what: "no event id", reason: "no-id", make: changed((event) => { event.event_id = null; }) },
  { what: "two ids that differ", reason: "id-mismatch", make: () => ({ message_id: crypto.randomUUID(), body: JSON.stringify(orderPlaced()) }) },
  { what: "an unknown event", reason: "unknown-type", make: changed((event) => { event.event_type = "teleported"; }) },
  { what: "a payload without items", reason: "schema", make: changed((event) => { delete event.payload.items; }) },
  { what: "a quantity that is no number", reason: "schema", make: changed((event) => { event.payload.items[0].quantity = "two"; }) },
  { what: "an id used before, for another body", reason: "id-reused", make: reused },
];

/** A good event first; then another one under its id. */
function reused() {
  const first = orderPlaced();
  const second = { ...orderPlaced(), event_id: first.event_id };
  return { message_id: first.event_id, before: JSON.stringify(first), body: JSON.stringify(second) };
}

/** Puts one dose into the queue of inventory; returns its message id, by which its letter is known. */
export async function administer(kind) {
  const { before, ...dose } = kind.make();
  const message_id = dose.message_id ?? crypto.randomUUID();
  if (before) await post("/v1/lab/publish", { queue: "inventory", message_id, body: before });
  await post("/v1/lab/publish", { queue: "inventory", message_id, ...dose });
  return message_id;
}
