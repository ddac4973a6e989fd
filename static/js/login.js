// Exchanges a key for a session, and goes on to the page that was wanted. The key is kept nowhere.

import * as api from "./api.js";
import { say } from "./dom.js";
import * as theme from "./theme.js";

theme.start();

const form = document.getElementById("login");
const error = document.getElementById("error");
form.key.focus();

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  error.hidden = true;
  try {
    await api.post("/v1/session", { key: form.key.value, group_id: form.group.value.trim() || undefined });
    location.replace(wanted());
  } catch (problem) {
    if (problem.code === "no-keys") return location.replace(wanted());
    say(error, problem.message);
    error.hidden = false;
    form.key.select();
  }
});

/** Where to go: a path of this server and nothing else. */
function wanted() {
  const next = new URLSearchParams(location.search).get("next") ?? "/";
  const url = new URL(next, location.origin);
  return url.origin === location.origin ? url.pathname + url.search : "/";
}
