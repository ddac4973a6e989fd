// Settings of this browser, and what the server says of itself.

import { h, put } from "../dom.js";
import * as live from "../live.js";
import { badge, card, facts, input, labelled, link } from "../parts.js";
import * as theme from "../theme.js";

const HIDE = "stockade.hide-payloads";

export default {
  title: "Settings",
  draw({ signal }) {
    const looks = input({ options: [["system", "as the system"], ["light", "light"], ["dark", "dark"]], value: theme.current() });
    looks.addEventListener("change", () => theme.set(looks.value));
    const density = input({ options: [["roomy", "roomy"], ["compact", "compact"]], value: theme.density() });
    density.addEventListener("change", () => theme.setDensity(density.value));
    const payloads = input({ options: [["no", "shown"], ["yes", "hidden"]], value: localStorage.getItem(HIDE) ?? "no" });
    payloads.addEventListener("change", () => localStorage.setItem(HIDE, payloads.value));
    const server = h("div", {}, h("p", { class: "quiet" }, "Looking…"));
    const update = () => {
      const known = live.picture.server;
      if (known) put(server, facts([
        ["Version", known.version],
        ["Status", badge(known.status)],
        ["Database", [known.database.kind, " ", badge(known.database.status)]],
        ["Queue", [known.broker.kind, " ", badge(known.broker.status)]],
        ["Fault lab", known.demo ? link("/lab", "open") : "closed; serve --demo opens it"],
      ]));
    };
    live.watch(update, signal);
    update();
    return [
      h("h1", {}, "Settings"),
      h("div", { class: "two" },
        card("This browser", {}, labelled("Theme", looks), labelled("Rows", density), labelled("Payloads", payloads, "Of dead letters, for when others look over your shoulder.")),
        card("This server", {}, server)),
      h("p", {}, "The server's own settings are flags and environment variables; ", h("code", {}, "stockade serve --help"), " is their manual."),
    ];
  },
};
