// Puts the dashboard together: the bar, the list of pages, the keys, and the routes.

import { h, put, say } from "./dom.js";
import { count, span } from "./format.js";
import * as live from "./live.js";
import * as router from "./router.js";
import { button } from "./parts.js";
import { jump } from "./search.js";
import * as session from "./session.js";
import * as theme from "./theme.js";
import actions from "./pages/actions.js";
import audit from "./pages/audit.js";
import deadLetter from "./pages/dead-letter.js";
import deadLetters from "./pages/dead-letters.js";
import inbox from "./pages/inbox.js";
import lab from "./pages/lab.js";
import ledger from "./pages/ledger.js";
import notifications from "./pages/notifications.js";
import order from "./pages/order.js";
import orders from "./pages/orders.js";
import outbox from "./pages/outbox.js";
import overview from "./pages/overview.js";
import queues from "./pages/queues.js";
import redrives from "./pages/redrives.js";
import replays from "./pages/replays.js";
import reservations from "./pages/reservations.js";
import settings from "./pages/settings.js";
import stock from "./pages/stock.js";

const PAGES = [
  ["", [["/", overview]]],
  ["Shop", [["/orders", orders], ["/reservations", reservations], ["/stock", stock], ["/notifications", notifications], ["/ledger", ledger]]],
  ["Messages", [["/queues", queues], ["/outbox", outbox], ["/inbox", inbox], ["/dead-letters", deadLetters], ["/redrives", redrives], ["/replays", replays]]],
  ["Trust", [["/audit", audit], ["/actions", actions], ["/lab", lab], ["/settings", settings]]],
];

for (const [, pages] of PAGES) for (const [path, page] of pages) router.route(path, page);
router.route("/orders/:id", order);
router.route("/dead-letters/:id", deadLetter);

theme.start();
await session.start();
drawBar();
drawSide();
listenForKeys();
put(document.getElementById("main"), h("p", { class: "quiet" }, "Connecting…"));
await live.start();
router.start();

function drawBar() {
  const search = h("input", { type: "search", id: "search", name: "q", placeholder: "Jump to any id, number or SKU", autocomplete: "off", spellcheck: "false", "aria-label": "Search: order, reservation, event, dead letter or SKU", "aria-keyshortcuts": "/" });
  const form = h("form", { class: "search", role: "search", onsubmit: (event) => {
    event.preventDefault();
    jump(search.value.trim());
    search.value = "";
  } }, search);
  const words = h("span", { class: "words" });
  const toggle = button([h("span", { class: "dot", "aria-hidden": "true" }), words], () => live.setPaused(!live.isPaused()), { class: "live", id: "live", "aria-keyshortcuts": "p" });
  const engines = h("span", { class: "engines", id: "engines" });
  const menu = button("Menu", () => {
    const open = document.body.classList.toggle("menu-open");
    menu.setAttribute("aria-expanded", String(open));
  }, { class: "menu", "aria-expanded": "false", "aria-controls": "side" });
  addEventListener("stockade:page", () => {
    document.body.classList.remove("menu-open");
    menu.setAttribute("aria-expanded", "false");
  });
  put(document.getElementById("bar"),
    menu,
    h("a", { class: "brand", href: "/", "aria-label": "Stockade" }, h("img", { src: "/static/icon.svg", alt: "", width: "24", height: "24" }), h("span", { class: "name" }, "Stockade")),
    form, engines, toggle,
    button(h("span", { "aria-hidden": "true" }, "◐"), () => theme.next(), { class: "square", "aria-label": "Change the theme", title: "Theme (t)", "aria-keyshortcuts": "t" }),
    button(h("span", { "aria-hidden": "true" }, "?"), () => help(), { class: "square help", "aria-label": "Keys and help", title: "Keys (?)", "aria-keyshortcuts": "?" }));

  const WORDS = { live: "Live", polling: "Live, every 5 s", connecting: "Connecting", paused: "Paused", hidden: "Resting", away: "Server away" };
  const update = () => {
    toggle.dataset.state = live.state;
    say(words, WORDS[live.state]);
    toggle.setAttribute("aria-label", live.isPaused() ? "Paused. Go on watching" : `${WORDS[live.state]}. Pause`);
    toggle.title = live.isPaused() ? "Go on (p)" : "Pause (p)";
    const { server, queues: all } = live.picture;
    if (server) {
      const instances = Math.max(0, ...(all ?? []).map((queue) => queue.consumers ?? 0));
      const parts = [`${server.database.kind} ${server.database.status}`, `${server.broker.kind} queue ${server.broker.status}`];
      if (instances > 1) parts.unshift(`${count(instances)} instances`);
      if (live.staleFor() > 3000) parts.push(`last seen ${span(live.staleFor())} ago`);
      say(engines, parts.join(" · "));
    }
  };
  live.watch(update);
  update();
}

function drawSide() {
  const links = new Map();
  const letters = h("span", { class: "count", hidden: true });
  const groups = PAGES.map(([name, pages]) => h("div", { class: "group" },
    name && h("h2", {}, name),
    h("ul", {}, pages.map(([path, page]) => {
      const element = h("a", { href: path }, page.title, page === deadLetters && letters);
      links.set(page, element);
      return h("li", { "data-page": path, hidden: page.forPlatform && !session.isPlatform() }, element);
    }))));
  put(document.getElementById("side"), groups,
    h("div", { class: "group foot" }, h("ul", {}, h("li", {}, h("a", { href: "/docs/" }, "API docs")))));
  session.draw(document.getElementById("side"));
  addEventListener("stockade:page", (event) => {
    const page = { [order.title]: orders, [deadLetter.title]: deadLetters }[event.detail.title] ?? event.detail;
    for (const [known, element] of links) {
      if (known === page) element.setAttribute("aria-current", "page");
      else element.removeAttribute("aria-current");
    }
  });
  live.watch(() => {
    const open = (live.picture.queues ?? []).reduce((sum, queue) => sum + queue.dead_letters, 0);
    letters.hidden = open === 0;
    put(letters, count(open), h("span", { class: "unseen" }, " open"));
    document.querySelector('[data-page="/lab"]').hidden = !session.hasLab();
  });
}

const GO = { o: "/orders", s: "/stock", d: "/dead-letters", q: "/queues", r: "/reservations", n: "/notifications", l: "/ledger", i: "/inbox", u: "/outbox", a: "/audit", f: "/lab", h: "/" };
const KEYS = [
  ["/", "search"], ["g then h", "overview"], ["g then o", "orders"], ["g then s", "stock"], ["g then r", "reservations"],
  ["g then d", "dead letters"], ["g then q", "queues"], ["g then a", "audit"], ["j and k", "next and previous row"],
  ["Enter", "open the row"], ["p", "pause or go on watching"], ["t", "theme"], ["?", "this help"],
];

function listenForKeys() {
  let going = 0;
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (event.key === "Escape" && event.target.id === "search") event.target.blur();
    if (typing || event.metaKey || event.ctrlKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (Date.now() - going < 1500) {
      going = 0;
      if (GO[event.key]) router.navigate(GO[event.key]);
      return;
    }
    const does = {
      "/": () => document.getElementById("search").focus(),
      g: () => { going = Date.now(); },
      p: () => live.setPaused(!live.isPaused()),
      t: () => theme.next(),
      "?": () => help(),
      j: () => step(1),
      k: () => step(-1),
    }[event.key];
    if (does) {
      event.preventDefault();
      does();
    }
  });
}

/** Moves along the rows of the tables by their first links. */
function step(by) {
  const rows = [...document.querySelectorAll("main tbody tr")].map((row) => row.querySelector("a, button")).filter(Boolean);
  const at = rows.findIndex((element) => element.closest("tr").contains(document.activeElement));
  rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : at + by]?.focus();
}

function help() {
  const dialog = h("dialog", { "aria-labelledby": "help-title", onclose: () => dialog.remove() },
    h("h2", { id: "help-title" }, "Keys"),
    h("dl", { class: "keys" }, KEYS.map(([key, words]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, words)))),
    h("p", {}, "An event is a fact; a message is an event on its way; the outbox holds what waits to be sent; the inbox knows what a consumer has dealt with; a dead letter is a message given up on."),
    h("form", { method: "dialog", class: "row end" }, h("button", { class: "primary" }, "Close")));
  document.body.append(dialog);
  dialog.showModal();
}
