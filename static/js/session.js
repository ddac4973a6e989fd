// Who is logged in, and the way out. On a server without keys there is nothing to see.

import * as api from "./api.js";
import { h, put } from "./dom.js";
import { button } from "./parts.js";

/** Draws the session at the foot of an element. */
export async function draw(element) {
  let session;
  try {
    session = await api.get("/v1/session");
  } catch {
    return; // whoever has none is at the login by now
  }
  if (session.open) return;
  const who = `${session.name}, ${session.role}${session.platform ? " of every group" : ""}`;
  const out = session.expires_at && button("Log out", async () => {
    await api.remove("/v1/session");
    location.assign("/login");
  }, { class: "small", id: "log-out" });
  element.append(put(h("div", { class: "group foot", id: "session" }), h("p", {}, who), out));
}
