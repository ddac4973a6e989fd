// The four demos as checklists that do their steps and tick themselves off. A step is done when what it promises can
// be seen, not when its call has answered.

import { find, get, path, post, postAtLast, put, query } from "./api.js";
import { KINDS, administer } from "./poison.js";

const PATIENCE_MS = 90_000;

/** Looks until something is there. */
async function until(what, look, signal) {
  const deadline = Date.now() + PATIENCE_MS;
  for (;;) {
    if (signal.aborted) throw new DOMException("left the page", "AbortError");
    const found = await look().catch((error) => {
      if (error.status === 0 || error.status === 503) return null; // away, and may be back
      throw error;
    });
    if (found) return found;
    if (Date.now() > deadline) throw new Error(`waited ${PATIENCE_MS / 1000} s for ${what}`);
    await new Promise((resolve) => setTimeout(resolve, 200));
  }
}

/** A shelf of the demo's own, so that nobody else's stock is touched. */
async function shelf(units) {
  const sku = `DEMO-${Math.random().toString(36).slice(2, 8).toUpperCase()}`;
  await put(path`/v1/stock/${sku}`, { on_hand: units });
  return sku;
}

const place = (sku, quantity, customer_id = "demo") => post("/v1/orders", { customer_id, items: [{ sku, quantity, unit_price_minor: 500 }] });
const queue = () => get("/v1/queues/inventory");
const orderIs = (order, status, signal) => until(`${order.number} to be ${status}`, async () => (await get(path`/v1/orders/${order.id}`)).status === status, signal);

async function promises() {
  const audit = await get("/v1/audit");
  if (audit.violations) throw new Error(`${audit.violations} promises are broken`);
  return `${audit.checks.length} promises hold`;
}

/** What inventory knows of the event that an order began with. */
async function arrival(order) {
  const { data } = await get(`/v1/outbox${query({ aggregate_type: "order", aggregate_id: order.id, limit: 50 })}`);
  const placed = data.find((row) => row.event_type === "order.placed" && !row.target);
  return placed && find(path`/v1/inbox/inventory/${placed.id}`);
}

async function reservationsOf(order) {
  return (await get(`/v1/reservations${query({ order_id: order.id })}`)).data.length;
}

export const DEMOS = [
  {
    name: "backlog",
    title: "Backlog and recovery",
    about: "Inventory rests while orders keep coming in. They must be taken all the same, wait, and be dealt with once it is back.",
    steps: [
      ["Put 200 units on a shelf of its own", async (run) => { run.sku = await shelf(200); return run.sku; }],
      ["Pause inventory", async () => { await post("/v1/consumers/inventory/pause"); }],
      ["Place 60 orders; each is answered at once", async (run) => {
        run.before = (await queue()).depth;
        run.orders = [];
        for (let round = 0; round < 12; round += 1) run.orders.push(...await Promise.all(Array.from({ length: 5 }, () => place(run.sku, 1))));
        return `${run.orders.length} answered`;
      }],
      ["The queue holds all of them", async (run) => {
        const { depth } = await until("the depth", async () => { const now = await queue(); return now.depth >= run.before + 60 && now; }, run.signal);
        return `depth ${depth}`;
      }],
      ["Nothing was reserved meanwhile", async (run) => {
        const { reserved } = await get(path`/v1/stock/${run.sku}`);
        if (reserved) throw new Error(`${reserved} units are reserved`);
      }],
      ["Resume inventory", async (run) => { run.resumed = Date.now(); await post("/v1/consumers/inventory/resume"); }],
      ["The queue drains, and each order has its unit", async (run) => {
        await until("60 reserved units", async () => (await get(path`/v1/stock/${run.sku}`)).reserved === 60, run.signal);
        return `60 units in ${Date.now() - run.resumed} ms`;
      }],
      ["Every promise holds", promises],
    ],
    mend: () => postAtLast("/v1/consumers/inventory/resume"),
  },
  {
    name: "duplicates",
    title: "Duplicates",
    about: "A broker may deliver a message any number of times. Here it comes ten times; stock must be taken once.",
    steps: [
      ["Put 50 units on a shelf of its own", async (run) => { run.sku = await shelf(50); return run.sku; }],
      ["Let the next delivery to inventory come nine times more", () => post("/v1/lab/duplicate", { consumer: "inventory", deliveries: 1, copies: 9 }).then(() => undefined)],
      ["Place one order of 5 units", async (run) => { run.order = await place(run.sku, 5); return run.order.number; }],
      ["It is reserved", (run) => orderIs(run.order, "reserved", run.signal).then(() => undefined)],
      ["The inbox dismissed nine copies", async (run) => {
        const row = await until("nine duplicates", async () => { const now = await arrival(run.order); return now?.duplicates >= 9 && now; }, run.signal);
        return `${row.duplicates} suppressed`;
      }],
      ["5 units are reserved, not 50", async (run) => {
        const { reserved } = await get(path`/v1/stock/${run.sku}`);
        if (reserved !== 5) throw new Error(`${reserved} units are reserved`);
        return "5 units, one reservation";
      }],
      ["Every promise holds", promises],
    ],
    mend: () => postAtLast("/v1/lab/reset"),
  },
  {
    name: "poison",
    title: "Poison",
    about: "Messages that nobody can read must not stop a consumer, must not come back for ever, and must not get lost.",
    steps: [
      ["An order before the poison is reserved", async (run) => {
        run.sku = await shelf(10);
        run.order = await place(run.sku, 1);
        await orderIs(run.order, "reserved", run.signal);
        return run.order.number;
      }],
      [`Put ${KINDS.length} kinds of poison into the queue of inventory`, async (run) => {
        run.doses = [];
        for (const kind of KINDS) run.doses.push([kind, await administer(kind)]);
      }],
      ["Each is a dead letter, with the right reason", async (run) => {
        const reasons = await until("the letters", async () => {
          const { data } = await get("/v1/dead-letters?consumer=inventory&limit=200");
          const found = run.doses.filter(([kind, id]) => data.some((letter) => letter.message_id === id && letter.reason === kind.reason));
          return found.length === run.doses.length && found;
        }, run.signal);
        return `${reasons.length} letters`;
      }],
      ["An order after it is reserved as before", async (run) => {
        await orderIs(await place(run.sku, 1), "reserved", run.signal);
      }],
      ["Every promise holds", promises],
    ],
  },
  {
    name: "crash",
    title: "Crash between commit and acknowledgement",
    about: "The worst moment to die: the reservation is committed, its message is not acknowledged and will come again. This ends the server; start it again when the list says so.",
    steps: [
      ["Put 10 units on a shelf of its own", async (run) => { run.sku = await shelf(10); return run.sku; }],
      ["Arm the crash: inventory, after the commit", () => post("/v1/lab/crash", { point: "consumer.after_commit", consumer: "inventory" }).then(() => undefined)],
      ["Place an order of 2 units", async (run) => {
        run.id = `lab-${crypto.randomUUID()}`;
        // The server may die before it answers; the key makes asking again safe.
        run.ask = () => post("/v1/orders", { customer_id: "demo", items: [{ sku: run.sku, quantity: 2, unit_price_minor: 500 }] }, { "Idempotency-Key": run.id });
        run.order = await run.ask().catch(() => null);
        return run.order ? run.order.number : "not answered";
      }],
      ["The server is gone", (run) => until("the server to die", async () => fetch("/livez").then(() => false, () => true), run.signal).then(() => undefined)],
      ["Start it again, with the command you started it with: stockade serve --demo", (run) => until("the server to be back", async () => find("/v1/health"), run.signal).then(() => undefined)],
      ["The order is reserved", async (run) => {
        run.order ??= await until("the order", run.ask, run.signal);
        await orderIs(run.order, "reserved", run.signal);
        return run.order.number;
      }],
      ["Once: one reservation, 2 units", async (run) => {
        const [reservations, { reserved }] = await Promise.all([reservationsOf(run.order), get(path`/v1/stock/${run.sku}`)]);
        if (reservations !== 1 || reserved !== 2) throw new Error(`${reservations} reservations, ${reserved} units`);
      }],
      ["Its message came again and was dismissed (when its lease of a minute is over)", async (run) => {
        const row = await until("the message to come again", async () => { const now = await arrival(run.order); return now?.duplicates > 0 && now; }, run.signal);
        return `${row.duplicates} suppressed`;
      }],
      ["Every promise holds", promises],
    ],
  },
];
