// The worst thing first, in one sentence, with what to do about it.

import { count, plural, span } from "./format.js";
import { shortName } from "./live.js";
import { link } from "./parts.js";

/** A message that is older than this is waiting for something. */
const OLD_MS = 10_000;

export function headline({ server, queues, audit, orders }, state) {
  if (state === "away") return { tone: "bad", words: "The server cannot be reached.", advice: "What you see is the last it said. The page connects again by itself as soon as it can." };
  // A tenant's key sees no queues: they are everybody's.
  if (server && !queues) return server.status === "ok" ? { tone: "ok", words: "The server is well.", advice: null } : { tone: "warn", words: `The server is ${server.status}.`, advice: null };
  if (!server || !queues) return { tone: "idle", words: "Looking…", advice: null };
  if (server.database.status === "down") return { tone: "bad", words: "The database cannot be reached.", advice: "Orders are refused until it is back; consumers wait and lose nothing." };
  if (server.broker.status === "blocked") return { tone: "bad", words: "The broker takes no messages just now.", advice: `Orders are still taken and kept in the outbox. ${server.broker.error ?? ""}` };
  if (server.broker.status === "down") return { tone: "bad", words: "The broker cannot be reached.", advice: "Orders are still taken and kept in the outbox; they go out within seconds of its return." };
  if (audit?.violations > 0) return { tone: "bad", words: `A promise is broken: ${plural(audit.violations, "violation")}.`, advice: ["See which, and the rows, in ", link("/audit", "the audit"), "."] };
  const loops = Object.entries({ relay: server.relay, ...server.consumers });
  const [missing] = loops.find(([, status]) => ["absent", "stopped"].includes(status.state)) ?? [];
  if (missing) return { tone: "bad", words: `No instance runs ${missing}.`, advice: "What is meant for it waits and is not lost. Start an instance that runs it: STOCKADE_MODULES says which parts one runs." };
  const [name, troubled] = loops.find(([, status]) => status.state === "troubled") ?? [];
  if (troubled) return { tone: "bad", words: `${name} cannot work just now: ${troubled.last_error ?? "no reason given"}.`, advice: "It backs off and tries again by itself; nothing in its queue is lost." };
  const letters = queues.reduce((sum, queue) => sum + queue.dead_letters + queue.dlq_depth, 0);
  if (letters) return { tone: "bad", words: `${plural(letters, "dead letter")} ${letters === 1 ? "waits" : "wait"} for you.`, advice: ["Read why, mend the cause, then redrive or discard: ", link("/dead-letters", "dead letters"), "."] };
  if (server.outbox?.dead) return { tone: "bad", words: `${plural(server.outbox.dead, "event")} could not be sent.`, advice: [link("/outbox?status=dead", "See why in the outbox"), "."] };
  const paused = queues.filter((queue) => queue.paused).map((queue) => shortName(queue));
  for (const loop of ["relay", "dead-letters"]) if (loops.some(([known, status]) => known === loop && status.state === "paused")) paused.push(loop);
  const oldest = Math.max(0, ...queues.map((queue) => queue.oldest_age_ms ?? 0));
  const waiting = queues.reduce((sum, queue) => sum + queue.depth, 0);
  if (paused.length) {
    return { tone: "warn", words: `${paused.join(" and ")} ${paused.length === 1 ? "is" : "are"} paused${waiting ? `; ${plural(waiting, "message waits", "messages wait")}${oldest > OLD_MS ? `, the oldest for ${span(oldest)}` : ""}` : ""}.`, advice: ["Orders are taken all the same. Resume below, or on ", link("/queues", "queues"), "."] };
  }
  if (oldest > OLD_MS) return { tone: "warn", words: `${plural(waiting, "message")} in the queues, the oldest for ${span(oldest)}.`, advice: ["The consumers are behind. ", link("/queues", "Queues"), " shows which."] };
  const placed = orders?.placed_last_minute ?? 0;
  const rate = placed ? `${count(placed)}${orders.at_least ? "+" : ""} ${placed === 1 ? "order" : "orders"} in the last minute, ` : "";
  return { tone: "ok", words: `All clear: ${rate}${waiting ? `${count(waiting)} on their way` : "nothing waiting"}.`, advice: null };
}
