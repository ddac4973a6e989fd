// Settings of this browser, and what the server says of itself.

import { operator } from "../api.js";
import { h, put } from "../dom.js";
import { ago } from "../format.js";
import * as live from "../live.js";
import { badge, card, facts, input, labelled, link, table } from "../parts.js";
import * as theme from "../theme.js";

export default {
  title: "Settings",
  draw({ signal }) {
    const kept = (field, keep) => {
      const element = input(field);
      element.addEventListener("change", () => keep(element.value));
      return element;
    };
    const name = kept({ value: operator.get(), maxlength: 64, placeholder: "anonymous" }, operator.set);
    const looks = kept({ options: [["system", "as the system"], ["light", "light"], ["dark", "dark"]], value: theme.current() }, theme.set);
    const density = kept({ options: [["roomy", "roomy"], ["compact", "compact"]], value: theme.density() }, theme.setDensity);
    const payloads = kept({ options: [["no", "shown"], ["yes", "hidden"]], value: theme.hidesPayloads() ? "yes" : "no" }, (value) => theme.setHidesPayloads(value === "yes"));
    const server = h("div", {}, h("p", { class: "quiet" }, "Looking…"));
    const instances = h("div", {});
    const update = (names) => {
      const known = live.picture.server;
      if (!known || !names.includes("server")) return;
      put(server, about(known));
      put(instances, everybody(known.instances));
    };
    live.watch(update, signal);
    update(["server"]);
    return [
      h("h1", {}, "Settings"),
      h("div", { class: "two" },
        card("This browser", {},
          labelled("Your name", name, "For the record of actions, on a server without API keys."),
          labelled("Theme", looks), labelled("Rows", density),
          labelled("Payloads", payloads, "Of dead letters, for when others look over your shoulder.")),
        card("This server", {}, server)),
      card("Instances", {}, instances),
      h("p", { class: "quiet" }, "The server's own settings are flags and environment variables; ", h("code", {}, "stockade serve --help"), " is their manual."),
    ];
  },
};

function about(server) {
  const part = ({ kind, status, error }) => [kind, " ", badge(status), error && h("div", { class: "note" }, error)];
  return facts([
    ["Version", server.version],
    ["Status", badge(server.status)],
    ["Database", part(server.database)],
    ["Queue", part(server.broker)],
    ["Fault lab", server.demo ? link("/lab", "open") : "closed; serve --demo opens it"],
  ]);
}

function everybody(rows) {
  return table("Instances", [
    { head: "Address", cell: (row) => h("strong", {}, row.address) },
    { head: "Version", cell: (row) => row.version },
    { head: "Started", cell: (row) => ago(row.started_at) },
    { head: "Runs", class: "wide", cell: (row) => Object.keys(row.loops).join(", ") || "only the API" },
  ], rows);
}
