// Paths to pages. A page is a module with a `title` and `draw(context)`; the URL holds all of its state. One that is
// `forPlatform` shows what is everybody's, and is drawn for those with a key for every group.

import { h, put } from "./dom.js";
import { empty, failure } from "./parts.js";
import { isPlatform } from "./session.js";

const routes = [];
let leave = null;

export function route(pattern, page) {
  routes.push([pattern.split("/"), page]);
}

export function navigate(url, { replace = false } = {}) {
  if (replace) history.replaceState(null, "", url);
  else history.pushState(null, "", url);
  show({ moved: true });
}

/** Draws the page that the address names. */
export async function show({ moved = false } = {}) {
  leave?.abort();
  leave = new AbortController();
  const { signal } = leave;
  const found = find(location.pathname);
  const main = document.getElementById("main");
  const context = { query: new URLSearchParams(location.search), signal, ...found };
  if (!found) {
    put(main, h("h1", {}, "There is no such page"), h("p", {}, "Go back, or ", h("a", { href: "/" }, "to the overview"), "."));
    return;
  }
  document.title = found.page.title === "Overview" ? "Stockade" : `${found.page.title} · Stockade`;
  dispatchEvent(new CustomEvent("stockade:page", { detail: found.page }));
  try {
    const content = found.page.forPlatform && !isPlatform() ? notForTenants(found.page) : await found.page.draw(context);
    if (signal.aborted) return;
    put(main, content);
  } catch (error) {
    if (signal.aborted || error.name === "AbortError") return;
    put(main, h("h1", {}, found.page.title), failure(error, "this page"));
  }
  if (moved) {
    scrollTo(0, 0);
    const heading = main.querySelector("h1");
    heading?.setAttribute("tabindex", "-1");
    heading?.focus({ preventScroll: true });
  }
}

function notForTenants({ title }) {
  return [h("h1", {}, title), empty("This needs a key for every group.", "What it shows is of all tenants together. Yours is on the other pages.")];
}

function find(path) {
  const parts = path.replace(/(.)\/$/, "$1").split("/");
  for (const [pattern, page] of routes) {
    if (pattern.length !== parts.length) continue;
    const params = {};
    const fits = pattern.every((part, index) => {
      if (!part.startsWith(":")) return part === parts[index];
      try {
        params[part.slice(1)] = decodeURIComponent(parts[index]);
        return true;
      } catch {
        return false;
      }
    });
    if (fits) return { page, params };
  }
  return null;
}

/** Links within the dashboard change the page without loading it anew; all others are the browser's. */
export function start() {
  addEventListener("popstate", () => show({ moved: true }));
  document.addEventListener("click", (event) => {
    const link = event.target.closest?.("a[href]");
    const plain = !event.defaultPrevented && event.button === 0 && !(event.metaKey || event.ctrlKey || event.shiftKey || event.altKey);
    if (!link || !plain || link.target || link.hasAttribute("download") || link.origin !== location.origin) return;
    if (link.getAttribute("href").startsWith("#") || !find(link.pathname)) return;
    event.preventDefault();
    navigate(link.pathname + link.search);
  });
  show();
}
