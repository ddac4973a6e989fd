// Figures, times and ids as people read them: local, with the exact value within reach.

import { h } from "./dom.js";

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const date = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "short", day: "numeric" });
const whole = new Intl.NumberFormat();

export function count(number) {
  return number === null || number === undefined ? "–" : whole.format(number);
}

/** "1 order", "2 orders". */
export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

/** An amount in minor units, in its currency. */
export function money(minor, currency) {
  try {
    const format = new Intl.NumberFormat(undefined, { style: "currency", currency });
    return format.format(minor / 10 ** format.resolvedOptions().maximumFractionDigits);
  } catch {
    return `${minor} ${currency}`;
  }
}

/** A span of time, roughly. Clocks may disagree; nothing takes less than no time. */
export function span(ms) {
  const t = Math.max(0, ms);
  if (t < 1000) return `${Math.round(t)} ms`;
  if (t < 10_000) return `${(t / 1000).toFixed(1)} s`;
  if (t < 120_000) return `${Math.round(t / 1000)} s`;
  if (t < 7_200_000) return `${Math.round(t / 60_000)} min`;
  if (t < 172_800_000) return `${Math.round(t / 3_600_000)} h`;
  return `${Math.round(t / 86_400_000)} days`;
}

/** A moment: local time of day, with the date if it is not today, and UTC on hover. */
export function time(iso) {
  if (!iso) return h("span", { class: "quiet" }, "–");
  const moment = new Date(iso);
  const today = moment.toDateString() === new Date().toDateString();
  const words = today ? clock.format(moment) : `${date.format(moment)}, ${clock.format(moment)}`;
  return h("time", { datetime: iso, title: `${iso.replace("T", " ").replace("Z", "")} UTC` }, words);
}

/** How long ago; ticks along. */
export function ago(iso) {
  if (!iso) return h("span", { class: "quiet" }, "–");
  const element = h("time", { datetime: iso, title: `${iso.replace("T", " ").replace("Z", "")} UTC`, "data-ago": true });
  tick(element);
  return element;
}

function tick(element) {
  const ms = Date.now() - new Date(element.getAttribute("datetime")).getTime();
  const words = ms >= 0 ? (ms < 1000 ? "just now" : `${span(ms)} ago`) : `in ${span(-ms)}`;
  if (element.textContent !== words) element.textContent = words;
}

setInterval(() => {
  if (!document.hidden) document.querySelectorAll("time[data-ago]").forEach(tick);
}, 1000);

/** The end of a uuid tells ids of the same second apart; the whole is on hover. */
export function short(id) {
  return id && id.length === 36 ? `…${id.slice(-12)}` : id ?? "–";
}

/** The lines of an order or a reservation, in a few words. */
export function lines(items) {
  const words = items.slice(0, 3).map((item) => `${item.sku} × ${count(item.quantity)}`);
  return items.length > 3 ? `${words.join(", ")} and ${items.length - 3} more` : words.join(", ") || "–";
}

/** JSON text with line breaks, token by token: no number passes through a script, where large ones lose digits. */
export function indented(json) {
  const tokens = json.match(/"(?:[^"\\]|\\.)*"|[{}[\],:]|[^\s"{}[\],:]+/g) ?? [];
  let depth = 0;
  let text = "";
  for (const [index, token] of tokens.entries()) {
    const isEmpty = "{[".includes(token) && "}]".includes(tokens[index + 1]);
    const closesEmpty = "}]".includes(token) && "{[".includes(tokens[index - 1]);
    if ("}]".includes(token)) depth -= 1;
    if ("}]".includes(token) && !closesEmpty) text += `\n${"  ".repeat(depth)}`;
    text += token === ":" ? ": " : token;
    if ("{[".includes(token)) depth += 1;
    if (token === "," || ("{[".includes(token) && !isEmpty)) text += `\n${"  ".repeat(depth)}`;
  }
  return text;
}

/** The type of an event; messages that cannot be read have none, or what they were sent back under. */
export function eventName(type) {
  return type && type !== "unreadable.message" ? type : "unreadable";
}
