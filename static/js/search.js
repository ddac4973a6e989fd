// From any id to the page about it.

import { find, path, query } from "./api.js";
import { complain, toast } from "./parts.js";
import { navigate } from "./router.js";

const UUID = /^[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}$/i;

export async function jump(words) {
  if (!words) return;
  try {
    const url = await look(words);
    if (url) navigate(url);
    else toast(`Nothing here is called “${words}”.`);
  } catch (error) {
    complain(error);
  }
}

async function look(words) {
  const order = await find(path`/v1/orders/${words}`);
  if (order) return path`/orders/${order.number}`;
  const reservation = await find(path`/v1/reservations/${words}`);
  if (reservation) return path`/orders/${reservation.order_id}`;
  if (UUID.test(words)) {
    if (await find(path`/v1/dead-letters/${words}`)) return path`/dead-letters/${words}`;
    const seen = await find(`/v1/inbox${query({ event_id: words, limit: 1 })}`);
    if (seen?.data.length) return `/inbox${query({ event_id: words })}`;
    const row = await find(path`/v1/outbox/${words}`);
    if (row) return `/outbox${query({ aggregate_id: row.aggregate_id })}`;
    if (await find(path`/v1/redrives/${words}`)) return `/dead-letters${query({ redrive: words })}`;
    if (await find(path`/v1/replays/${words}`)) return "/replays";
    const told = await find(`/v1/notifications${query({ id: words })}`);
    if (told?.data.length) return `/notifications${query({ order_id: told.data[0].order_id })}`;
  }
  if (await find(path`/v1/stock/${words}`)) return `/stock${query({ sku: words })}`;
  if (await find(path`/v1/queues/${words}`)) return "/queues";
  const lists = [["/orders", "customer_id"], ["/orders", "correlation_id"], ["/ledger", "account", "/entries"], ["/dead-letters", "correlation_id"], ["/dead-letters", "reason"]];
  for (const [page, name, rest = ""] of lists) {
    const found = await find(`/v1${page}${rest}${query({ [name]: words, limit: 1 })}`);
    if (found?.data.length) return page + query({ [name]: words });
  }
  return null;
}
