// Who is logged in, what they may do, and the way out. On a server without keys anybody may do anything.
//
// The server decides; the dashboard only leaves out what it would refuse.

import * as api from "./api.js";
import { h, put } from "./dom.js";
import * as live from "./live.js";
import { button } from "./parts.js";

let session = null;

/** Asks who it is. */
export async function start() {
  session = await api.find("/v1/session").catch(() => null); // whoever is nobody is at the login by now
}

/** Is it of every group? Tenants see neither the queues nor the promises, which are everybody's. */
export function isPlatform() {
  return session?.platform ?? true;
}

/** May it do what needs this role? */
export function may(role) {
  return !session || [role, "admin"].includes(session.role);
}

/** Is there a fault lab, and may it be used? */
export function hasLab() {
  return Boolean(live.picture.server?.demo) && isPlatform() && may("operator");
}

/** Draws the session at the foot of an element. */
export function draw(element) {
  if (!session || session.open) return;
  const who = `${session.name}, ${session.role}${session.platform ? " of every group" : ""}`;
  const out = session.expires_at && button("Log out", async () => {
    await api.remove("/v1/session");
    location.assign("/login");
  }, { class: "small", id: "log-out" });
  element.append(put(h("div", { class: "group foot", id: "session" }), h("p", {}, who), out));
}
