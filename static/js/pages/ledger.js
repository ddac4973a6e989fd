// The ledger: two entries for each payment, which sum to zero.

import { get, path } from "../api.js";
import { h, put } from "../dom.js";
import { count, money, short, time } from "../format.js";
import { follow, list } from "../list.js";
import { badge, card, empty, failure, link, table } from "../parts.js";

export default {
  title: "Ledger",
  draw: (context) => [
    h("h1", {}, "Ledger"),
    balances(context),
    list({
      endpoint: "/v1/ledger/entries",
      what: "the ledger",
      sections: ["orders"],
      filters: [
        { name: "account", label: "Account" },
        { name: "order_id", label: "Order id" },
      ],
      nothing: empty("The books are empty.", "Pay a reserved order, on its page, and its two entries appear here."),
      columns: [
        { head: "Account", cell: (row) => link(`/ledger?account=${encodeURIComponent(row.account)}`, row.account) },
        { head: "Amount", class: "number", cell: (row) => money(row.amount_minor, row.currency) },
        { head: "Order", cell: (row) => link(path`/orders/${row.order_id}`, short(row.order_id)) },
        { head: "Booked", cell: (row) => time(row.created_at) },
      ],
    }, context),
  ],
};

function balances({ signal }) {
  const body = h("div", {}, h("p", { class: "quiet" }, "Looking…"));
  const look = async () => {
    try {
      const { data, next_cursor: more } = await get("/v1/ledger/balances?limit=200", signal);
      put(body, data.length ? [more ? first(data) : sums(data), table("Balances", [
        { head: "Account", cell: (row) => link(`/ledger?account=${encodeURIComponent(row.account)}`, row.account) },
        { head: "Balance", class: "number", cell: (row) => money(row.balance_minor, row.currency) },
      ], data)] : h("p", { class: "quiet" }, "No account has been moved yet."));
    } catch (error) {
      if (error.name !== "AbortError") put(body, failure(error, "balances"));
    }
  };
  look();
  follow(["orders"], signal, look);
  return card("Balances", {}, body);
}

/** Part of the books says nothing about the whole. */
function first(rows) {
  return h("p", { class: "quiet" }, `The first ${count(rows.length)} accounts. Whether all of them sum to zero is one of `, link("/audit", "the promises"), ".");
}

/** The books balance if each currency comes to zero. */
function sums(rows) {
  const totals = new Map();
  for (const row of rows) totals.set(row.currency, (totals.get(row.currency) ?? 0) + row.balance_minor);
  return h("p", { class: "row" }, [...totals].map(([currency, total]) =>
    total === 0 ? badge(`${currency}: sums to zero`, "ok") : badge(`${currency}: off by ${money(total, currency)}`, "bad")));
}
