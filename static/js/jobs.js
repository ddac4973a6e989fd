// Redrives and replays under way: progress, and a way to stop them.

import { get, post } from "./api.js";
import { h, isHeld, put } from "./dom.js";
import { count, time } from "./format.js";
import { follow } from "./list.js";
import { act, badge, card, failure, table } from "./parts.js";

export function jobs(endpoint, what, signal, nothing = "None yet.") {
  const body = h("div", {});
  let timer = null;
  const look = async () => {
    clearTimeout(timer);
    try {
      const { data } = await get(`${endpoint}?limit=20`, signal);
      if (!isHeld(body)) put(body, data.length ? draw(data) : h("p", { class: "quiet" }, nothing));
      // One that runs is watched closely; the live picture tells of new ones.
      if (data.some((job) => !job.finished_at)) timer = setTimeout(look, 1000);
    } catch (error) {
      if (error.name !== "AbortError") put(body, failure(error, what));
    }
  };
  const draw = (rows) => table(what, [
    { head: "State", cell: (job) => badge(job.state) },
    { head: "What", class: "wide", cell: (job) => criteria(job) },
    { head: "Progress", class: "wide", cell: (job) => progress(job) },
    { head: "Already applied", class: "number", cell: (job) => count(part(job, "already_applied")) },
    { head: "By", cell: (job) => job.who ?? "–" },
    { head: "Started", cell: (job) => time(job.created_at) },
    { head: "Action", cell: (job) => !job.finished_at && act("Stop", async () => {
      await post(`${endpoint}/${encodeURIComponent(job.id)}/stop`);
      look();
    }, { class: "small" }) },
  ], rows);
  look();
  follow(["queues", "server"], signal, look);
  signal.addEventListener("abort", () => clearTimeout(timer));
  return card(what[0].toUpperCase() + what.slice(1), {}, body);
}

function part(job, name) {
  return job[name] ?? job.progress?.[name] ?? 0;
}

function progress(job) {
  const done = part(job, "sent") + part(job, "already_applied") + part(job, "skipped") + part(job, "refused");
  return h("span", { class: "meter" },
    h("progress", { max: String(Math.max(1, job.total ?? 0)), value: String(done), "aria-label": "progress" }), ` ${count(done)} of ${count(job.total)}`);
}

function criteria(job) {
  const set = Object.entries(job.criteria ?? job.filter ?? {}).filter(([, value]) => value && (!Array.isArray(value) || value.length));
  return set.map(([name, value]) => `${name.replaceAll("_", " ")} ${Array.isArray(value) ? `${value.length} of them` : value}`).join(", ") || "everything";
}
