// The parts that pages are made of: badges, tables, filters, dialogs, toasts, sparklines.

import { Problem } from "./api.js";
import { h, put, svg } from "./dom.js";
import { count } from "./format.js";

const TONES = {
  ok: ["reserved", "paid", "fulfilled", "held", "committed", "sent", "processed", "published", "running", "done", "redriven", "up", "ok"],
  bad: ["rejected", "dead", "failed", "troubled", "down", "open", "unavailable"],
  warn: ["retrying", "waiting", "paused", "expired", "unknown", "degraded", "busy", "stopped"],
};
const MARKS = { ok: "✓", bad: "✕", warn: "!", idle: "•" };

function toneOf(word) {
  return Object.keys(TONES).find((tone) => TONES[tone].includes(word)) ?? "idle";
}

/** A state: a mark, a word and a colour, any of which is enough. */
export function badge(word, tone = toneOf(word)) {
  return h("span", { class: `badge ${tone}` }, h("span", { class: "mark", "aria-hidden": "true" }, MARKS[tone]), word);
}

export function link(href, ...children) {
  return h("a", { href }, ...children);
}

/** An id in full on hover and on copying, short in the text. */
export function mono(text, title) {
  return h("span", { class: "mono", title }, text);
}

export function button(label, onclick, props = {}) {
  return h("button", { type: "button", onclick, ...props }, label);
}

/** Something was done: what is shown is asked for anew, also where it is held still for the reader. */
function acted() {
  dispatchEvent(new CustomEvent("stockade:acted"));
}

export function onActed(signal, look) {
  addEventListener("stockade:acted", look, { signal });
}

/** A button that cannot be pressed again while what it started is under way, and says what went wrong. */
export function act(label, work, props = {}) {
  const element = button(label, async () => {
    if (element.getAttribute("aria-disabled") === "true") return;
    element.setAttribute("aria-disabled", "true");
    try {
      await work();
      acted();
    } catch (error) {
      if (error.name !== "AbortError") complain(error);
    } finally {
      element.removeAttribute("aria-disabled");
    }
  }, props);
  return element;
}

/** A real table. Columns: {head, cell(row), class}. */
export function table(caption, columns, rows, { hidden = true } = {}) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", { class: hidden ? "unseen" : null }, caption),
      h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col", class: column.class }, column.head)))),
      h("tbody", {}, rows.map((row) =>
        h("tr", {}, columns.map((column) => h("td", { class: column.class, "data-head": column.head }, column.cell(row))))))));
}

/** What to show where there is nothing: what would be here, and how to get one. */
export function empty(title, ...words) {
  return h("div", { class: "empty" }, h("p", { class: "title" }, title), h("p", {}, ...words));
}

export function card(title, props, ...children) {
  return h("section", { class: "card", ...props }, title && h("h2", {}, title), ...children);
}

/** Terms and what they are. */
export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([term, value]) => h("div", {}, h("dt", {}, term), h("dd", {}, value))));
}

const CHARACTERS_SHOWN = 65_536;
const BYTES_SHOWN = 16_384;

/** Text exactly as it came, never as markup; long ones are cut, the whole can be had. */
export function verbatim(text, { label, name = "payload.txt" }) {
  const cut = text.length > CHARACTERS_SHOWN;
  return exhibit(cut ? `${text.slice(0, CHARACTERS_SHOWN)}\n…` : text, label,
    button("Copy", () => copy(text), { class: "small" }),
    cut && button(`Save all ${count(text.length)} characters`, () => save(text, name), { class: "small" }));
}

/** Bytes that are no text, in hex; of many the first, and the whole can be had as it came. */
export function dump(base64, { label, name = "payload.bin" }) {
  const bytes = Uint8Array.from(atob(base64), (char) => char.charCodeAt(0));
  const shown = hexdump(bytes.subarray(0, BYTES_SHOWN));
  const cut = bytes.length > BYTES_SHOWN;
  return exhibit(cut ? `${shown}\n…` : shown, label,
    button("Copy", () => copy(shown), { class: "small" }),
    button(`Save all ${count(bytes.length)} bytes`, () => save(bytes, name), { class: "small" }),
    cut && h("span", { class: "quiet" }, `The first ${count(BYTES_SHOWN)} of ${count(bytes.length)} bytes are shown.`));
}

function exhibit(shown, label, ...tools) {
  return h("div", { class: "verbatim" },
    h("div", { class: "row tools" }, ...tools),
    h("pre", { tabindex: "0", role: "region", "aria-label": label }, shown));
}

function save(content, name) {
  const url = URL.createObjectURL(new Blob([content], { type: typeof content === "string" ? "text/plain" : "application/octet-stream" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function hexdump(bytes) {
  const rows = [];
  for (let at = 0; at < bytes.length; at += 16) {
    const row = [...bytes.slice(at, at + 16)];
    const digits = row.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
    const letters = row.map((byte) => (byte >= 32 && byte < 127 ? String.fromCharCode(byte) : ".")).join("");
    rows.push(`${at.toString(16).padStart(8, "0")}  ${digits.padEnd(47)}  ${letters}`);
  }
  return rows.join("\n");
}

/** Works on plain HTTP too, where browsers keep the clipboard to themselves. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { class: "unseen", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  toast("Copied.");
}

/** A line of the last minute. */
export function sparkline() {
  const line = svg("polyline", { class: "spark-line" });
  const area = svg("polygon", { class: "spark-area" });
  const base = svg("line", { class: "spark-base", x1: 0, x2: 120, y1: 27, y2: 27 });
  const element = svg("svg", { class: "spark", viewBox: "0 0 120 28", preserveAspectRatio: "none", role: "img", "aria-label": "depth over the last minute" }, base, area, line);
  return {
    element,
    draw(points) {
      const top = Math.max(4, ...points);
      const at = (value, index) => `${((120 / 59) * (60 - points.length + index)).toFixed(1)},${(26 - (24 * value) / top).toFixed(1)}`;
      const corners = points.map(at);
      line.setAttribute("points", corners.join(" "));
      area.setAttribute("points", corners.length ? `${corners[0].split(",")[0]},28 ${corners.join(" ")} 120,28` : "");
      element.setAttribute("aria-label", `depth over the last minute, at most ${Math.max(0, ...points)}`);
    },
  };
}

export function toast(...children) {
  const element = h("div", { class: "toast" }, ...children, button("×", () => element.remove(), { class: "plain", "aria-label": "Dismiss" }));
  const shown = document.getElementById("toasts");
  while (shown.children.length > 1) shown.firstChild.remove();
  shown.append(element);
  setTimeout(() => element.remove(), 9000);
  return element;
}

/** Says what went wrong, in the server's words. */
export function complain(error) {
  const element = toast(h("strong", {}, "That did not work: "), sentence(error));
  element.classList.add("bad");
  if (!(error instanceof Problem)) console.error(error);
}

export function sentence(error) {
  if (error instanceof Problem && error.status === 401) return "this server wants an API key.";
  if (error instanceof Problem && error.status === 403) return `your key does not allow it: ${error.message}.`;
  const id = error.requestId ? ` (request ${error.requestId})` : "";
  return `${error.message ?? error}${id}`;
}

/** What a page shows in place of what it could not get. */
export function failure(error, what) {
  return h("div", { class: "empty bad", role: "alert" },
    h("p", { class: "title" }, `Cannot show ${what} just now.`), h("p", {}, sentence(error)));
}

/**
 * Asks for a few values and does something with them. Fields: {name, label, type, value, min, max, options, hint,
 * required}. `work` gets the values; the dialog stays open with the problem if it fails. Without `confirm` there is
 * nothing to do but to read.
 */
export function ask({ title, words, fields = [], confirm, danger = false, work }) {
  const problem = h("p", { class: "problem", role: "alert" });
  const inputs = fields.map((field) => [field, input(field)]);
  const submit = h("button", { type: "submit", class: danger ? "danger" : "primary" }, confirm);
  const dialog = h("dialog", { "aria-labelledby": "dialog-title", onclose: () => dialog.remove() },
    h("form", {
      onsubmit: async (event) => {
        event.preventDefault();
        submit.disabled = true;
        try {
          await work(Object.fromEntries(inputs.map(([field, element]) => [field.name, element.value.trim()])));
          dialog.close();
          acted();
        } catch (error) {
          put(problem, sentence(error));
          submit.disabled = false;
        }
      },
    },
    h("h2", { id: "dialog-title" }, title),
    [words].flat().map((part) => (typeof part === "string" ? h("p", {}, part) : part)),
    inputs.map(([field, element]) => labelled(field.label, element, field.hint)),
    problem,
    h("div", { class: "row end" }, button(confirm ? "Cancel" : "Close", () => dialog.close()), confirm && submit)));
  document.body.append(dialog);
  (inputs[0]?.[1] ?? submit).setAttribute("autofocus", ""); // not the first thing that scrolls
  dialog.showModal();
}

let fresh = 0;

export function labelled(label, element, hint) {
  element.id ||= `field-${(fresh += 1)}`;
  const about = hint && h("span", { class: "hint", id: `${element.id}-hint` }, hint);
  if (about) element.setAttribute("aria-describedby", about.id);
  return h("div", { class: "field" }, h("label", { for: element.id }, label), element, about);
}

export function input({ type = "text", value = "", options, name, min, max, required, placeholder, maxlength }) {
  if (options) {
    const element = h("select", { name, required }, options.map((option) => {
      const [key, words] = Array.isArray(option) ? option : [option, option || "any"];
      return h("option", { value: key }, words);
    }));
    element.value = value;
    return element;
  }
  return h("input", { type, name, min, max, required, placeholder, maxlength, value, autocomplete: "off", spellcheck: "false" });
}
