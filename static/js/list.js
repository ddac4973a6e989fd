// A list page: filters in the URL, rows from one endpoint, more on demand, and news while it is looked at.

import { get, query } from "./api.js";
import { h, isHeld, put, redraw } from "./dom.js";
import * as live from "./live.js";
import { button, complain, failure, input, labelled, onActed, table } from "./parts.js";
import { navigate } from "./router.js";

/** A list is asked for again no more often than this while it changes. */
const REFRESH_MS = 2000;
/** What follows a part of the picture that is not there, as tenants' have no queues, is asked for this often. */
const UNTOLD_MS = 5000;
/** One whose rows are under way is asked for this often. */
const MOVING_MS = 1000;

/**
 * `endpoint`: where the rows are. `filters`: fields whose values are the URL's query and the endpoint's. `columns`: see
 * `table`. `sections`: which parts of the live picture tell that there may be news. `nothing`: what an empty list says.
 * `what`: the rows in words. `isMoving(rows)`: should they be looked at again soon, whatever the picture tells?
 */
export function list({ endpoint, filters = [], columns, sections = [], nothing, what, isMoving = () => false }, { query: asked, signal }) {
  const known = Object.fromEntries(filters.map((filter) => [filter.name, asked.get(filter.name) ?? ""]));
  const filtered = Object.values(known).some((value) => value !== "");
  const body = h("div", { class: "list", "aria-busy": "true" });
  let rows = [];
  let cursor = null;
  let pages = 0;
  let soon = null;

  const load = async (more) => {
    const page = await get(endpoint + query({ ...known, limit: 50, cursor: more ? cursor : null }), signal);
    rows = more ? [...rows, ...page.data] : page.data;
    cursor = page.next_cursor;
    pages = more ? pages + 1 : 1;
    body.removeAttribute("aria-busy");
    draw();
    clearTimeout(soon);
    if (isMoving(rows)) soon = setTimeout(news, MOVING_MS);
  };
  const draw = () => {
    const none = filtered
      ? h("div", { class: "empty" }, h("p", { class: "title" }, `No ${what} like that.`), h("p", {}, button("Clear the filters", () => navigate(location.pathname))))
      : nothing;
    const more = cursor && h("div", { class: "row" }, button("Show more", () => load(true).catch(complain)));
    redraw(body, rows.length ? table(what, columns, rows) : none, more);
  };
  const first = () => load(false).catch((error) => {
    if (error.name === "AbortError" || pages > 0) return;
    body.removeAttribute("aria-busy");
    put(body, failure(error, what));
  });
  // Whoever reads further down, or has a row in hand, keeps what is there.
  const news = () => {
    clearTimeout(soon);
    if (pages === 1 && !isHeld(body)) first();
    else if (isMoving(rows)) soon = setTimeout(news, MOVING_MS);
  };
  first();
  onActed(signal, () => pages === 1 && first());
  follow(sections, signal, news);
  signal.addEventListener("abort", () => clearTimeout(soon));
  return [filters.length > 0 && form(filters, known), body];
}

/** Calls back when there may be news in one of the sections, not too often. */
export function follow(sections, signal, look) {
  let last = Date.now();
  let timer = null;
  const run = () => {
    timer = null;
    last = Date.now();
    if (!signal.aborted) look();
  };
  live.watch((names) => {
    if (timer === null && names.some((name) => sections.includes(name))) {
      timer = setTimeout(run, Math.max(0, last + REFRESH_MS - Date.now()));
    }
  }, signal);
  const isTold = () => sections.some((name) => name in live.picture);
  const asks = setInterval(() => live.isLive() && !isTold() && look(), UNTOLD_MS);
  signal.addEventListener("abort", () => {
    clearTimeout(timer);
    clearInterval(asks);
  });
}

function form(filters, known) {
  const go = (event) => {
    event.preventDefault();
    const set = filters.map((filter, index) => [filter.name, inputs[index].value.trim()]).filter(([, value]) => value);
    navigate(`${location.pathname}${query(Object.fromEntries(set))}`);
  };
  const inputs = filters.map((filter) => input({ ...filter, value: known[filter.name] }));
  const element = h("form", { class: "filters", role: "search", "aria-label": "Filters", onsubmit: go },
    filters.map((filter, index) => labelled(filter.label, inputs[index])),
    h("button", { type: "submit" }, "Filter"));
  for (const [index, filter] of filters.entries()) {
    if (filter.options) inputs[index].addEventListener("change", go);
  }
  return element;
}
