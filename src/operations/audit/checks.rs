//! The promises, each as a query that finds those who break it. To add one, add an entry.
//!
//! A query gives one column, what to call the offender. It is the same on both databases but for these words:
//!
//! - `{orders}`, `{reservations}`, `{notices}`, `{entries}`, `{keys}`, `{verdicts}` (the inbox), `{events}`: the table, or
//!   only its rows of a window in time;
//! - `{event where X}`: is there an event `a`, in the outbox or its archive, for which X holds?
//! - `{text of X}`: the uuid X as text; `{uuid of X}`: the other way round; `{type in X}`: the word before the dot;
//! - `{minutes N}`: a span of time;
//! - `{forgotten X}`: until when retention has removed `events`, `verdicts` (inbox rows) or `letters`.
//!
//! A promise that holds only once things have come to rest says so in its query: it asks of events that were dealt
//! with, never of those under way. What retention has forgotten is asked of nothing: the inbox remembers what the outbox
//! and its archive do and longer, and what else must be remembered is younger than what was forgotten.

/// A promise and how to find those who break it.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    pub name: &'static str,
    /// In words.
    pub promise: &'static str,
    pub offenders: &'static str,
}

pub const CHECKS: &[Check] = &[
    Check {
        name: "stock-conserved",
        promise: "what was put on a shelf is on hand or was fulfilled",
        offenders: "SELECT s.group_id || ' ' || s.sku AS subject FROM inventory_stock s
             LEFT JOIN (SELECT group_id, sku, sum(delta) AS total FROM inventory_adjustments GROUP BY group_id, sku) a
                 ON a.group_id = s.group_id AND a.sku = s.sku
             WHERE COALESCE(a.total, 0) <> s.on_hand + s.fulfilled",
    },
    Check {
        name: "stock-never-negative",
        promise: "no count is negative and no more is reserved than there is",
        offenders: "SELECT group_id || ' ' || sku AS subject FROM inventory_stock
             WHERE on_hand < 0 OR reserved < 0 OR fulfilled < 0 OR reserved > on_hand",
    },
    Check {
        name: "reserved-equals-holds",
        promise: "what is reserved of a SKU is what reservations hold of it",
        offenders: "SELECT s.group_id || ' ' || s.sku AS subject FROM inventory_stock s
             LEFT JOIN (SELECT l.group_id, l.sku, sum(l.quantity) AS total FROM inventory_reservations r
                     JOIN inventory_reservation_lines l ON l.group_id = r.group_id AND l.reservation_id = r.id
                     WHERE r.state IN ('held', 'committed') GROUP BY l.group_id, l.sku) h
                 ON h.group_id = s.group_id AND h.sku = s.sku
             WHERE s.reserved <> COALESCE(h.total, 0)",
    },
    Check {
        name: "fulfilled-equals-shipments",
        promise: "what is fulfilled of a SKU is what fulfilled reservations held of it",
        offenders: "SELECT s.group_id || ' ' || s.sku AS subject FROM inventory_stock s
             LEFT JOIN (SELECT l.group_id, l.sku, sum(l.quantity) AS total FROM inventory_reservations r
                     JOIN inventory_reservation_lines l ON l.group_id = r.group_id AND l.reservation_id = r.id
                     WHERE r.state = 'fulfilled' GROUP BY l.group_id, l.sku) h
                 ON h.group_id = s.group_id AND h.sku = s.sku
             WHERE s.fulfilled <> COALESCE(h.total, 0)",
    },
    Check {
        name: "one-answer-per-order",
        promise: "inventory answers an order once",
        // Not by groups: the two may lie further apart than a window is wide.
        offenders: "SELECT e.aggregate_id AS subject FROM {events} e
             WHERE e.routing_key IN ('inventory.reserved', 'inventory.failed') AND
                 {event where a.aggregate_type = 'inventory' AND a.aggregate_id = e.aggregate_id
                     AND a.group_id = e.group_id AND a.id < e.event_id}",
    },
    Check {
        name: "answers-are-true",
        promise: "an order said to be reserved has a reservation, one said to have failed holds nothing",
        offenders: "SELECT e.aggregate_id || ' ' || e.event_type AS subject FROM {events} e
             LEFT JOIN inventory_reservations r ON r.group_id = e.group_id AND r.order_id = {uuid of e.aggregate_id}
             WHERE (e.routing_key = 'inventory.reserved' AND r.id IS NULL)
                 OR (e.routing_key = 'inventory.failed' AND r.state <> 'released')",
    },
    Check {
        name: "no-order-forgotten",
        promise: "an order whose events were all dealt with has its answer",
        offenders: "SELECT o.number AS subject FROM {events} e
             JOIN messaging_inbox i ON i.consumer = 'inventory' AND i.event_id = e.event_id AND i.state = 'processed'
             JOIN orders_orders o ON o.group_id = e.group_id AND o.id = {uuid of e.aggregate_id}
             WHERE e.routing_key = 'order.placed' AND o.status = 'placed' AND NOT
                 {event where a.aggregate_type = 'inventory' AND a.aggregate_id = e.aggregate_id
                     AND a.group_id = e.group_id
                     AND NOT EXISTS (SELECT 1 FROM messaging_inbox j
                         WHERE j.consumer = 'orders' AND j.event_id = a.id AND j.state = 'processed')}",
    },
    Check {
        name: "orders-have-events",
        promise: "an order was announced, and one that moved on has inventory's answer",
        offenders: "SELECT o.number AS subject FROM {orders} o
             WHERE o.created_at >= {forgotten events} AND (
                 NOT {event where a.aggregate_type = 'order' AND a.aggregate_id = {text of o.id}
                     AND a.group_id = o.group_id AND a.event_type = 'placed'}
                 OR (o.status NOT IN ('placed', 'cancelled')
                     AND NOT {event where a.aggregate_type = 'inventory' AND a.aggregate_id = {text of o.id}
                         AND a.group_id = o.group_id
                         AND a.event_type = CASE o.status WHEN 'rejected' THEN 'failed' ELSE 'reserved' END}))",
    },
    Check {
        name: "no-phantoms",
        promise: "what was dealt with about an order of ours is an event of ours",
        // Of an order whose earlier event is still remembered, so that this one cannot have been forgotten.
        offenders: "SELECT v.consumer || ' ' || {text of v.event_id} AS subject FROM {verdicts} v
             WHERE v.state = 'processed' AND NOT {event where a.id = v.event_id}
                 AND {event where a.aggregate_type = {type in v.event_type} AND a.aggregate_id = v.aggregate_id
                     AND a.group_id = v.group_id AND a.id < v.event_id AND a.created_at >= {forgotten events}}",
    },
    Check {
        name: "one-body-per-event",
        promise: "an event had one body for all who dealt with it, or another was put aside as a letter",
        offenders: "SELECT {text of v.event_id} AS subject FROM {verdicts} v GROUP BY v.event_id
             HAVING count(DISTINCT v.body_hash) > 1 AND min(v.started_at) >= {forgotten letters}
                 AND NOT EXISTS (SELECT 1 FROM messaging_dead_letters d
                     WHERE d.event_id = v.event_id AND d.reason = 'id-reused')",
    },
    Check {
        name: "orders-took-legal-steps",
        promise: "an order is where its steps took it, and took each once: paid, cancelled or expired, fulfilled once paid",
        offenders: "SELECT o.number AS subject FROM {events} e
             JOIN orders_orders o ON o.group_id = e.group_id AND o.id = {uuid of e.aggregate_id}
             WHERE e.routing_key IN ('order.paid', 'order.cancelled', 'order.expired', 'order.fulfilled')
                 AND o.status <> e.event_type AND NOT (e.event_type = 'paid' AND o.status = 'fulfilled')
             UNION ALL SELECT e.aggregate_id || ' ' || e.event_type FROM {events} e
             WHERE e.routing_key LIKE 'order.%' AND
                 {event where a.aggregate_type = 'order' AND a.aggregate_id = e.aggregate_id
                     AND a.group_id = e.group_id AND a.event_type = e.event_type AND a.id < e.event_id}
             UNION ALL SELECT o.number FROM {orders} o
             WHERE (o.status IN ('paid', 'cancelled', 'expired', 'fulfilled') AND o.updated_at >= {forgotten events}
                     AND NOT {event where a.aggregate_type = 'order' AND a.aggregate_id = {text of o.id}
                         AND a.group_id = o.group_id AND a.event_type = o.status})
                 OR (o.status = 'fulfilled' AND o.created_at >= {forgotten events}
                     AND NOT {event where a.aggregate_type = 'order' AND a.aggregate_id = {text of o.id}
                         AND a.group_id = o.group_id AND a.event_type = 'paid'})",
    },
    Check {
        name: "orders-and-reservations-agree",
        promise: "an order's state and its reservation's fit together, and are the same once inventory has dealt with it",
        offenders: "SELECT o.number AS subject FROM {orders} o
             LEFT JOIN inventory_reservations r ON r.group_id = o.group_id AND r.order_id = o.id
             WHERE (o.status = 'reserved' AND COALESCE(r.state, '') <> 'held')
                 OR (o.status = 'rejected' AND COALESCE(r.state, 'released') <> 'released')
                 OR (o.status = 'paid' AND COALESCE(r.state, '') NOT IN ('held', 'committed'))
                 OR (o.status = 'fulfilled' AND COALESCE(r.state, 'released') = 'released')
                 OR (o.status IN ('placed', 'cancelled', 'expired') AND r.state IN ('committed', 'fulfilled'))
             UNION SELECT o.number FROM {events} e
             JOIN messaging_inbox i ON i.consumer = 'inventory' AND i.event_id = e.event_id AND i.state = 'processed'
             JOIN orders_orders o ON o.group_id = e.group_id AND o.id = {uuid of e.aggregate_id}
             LEFT JOIN inventory_reservations r ON r.group_id = o.group_id AND r.order_id = o.id
             WHERE e.routing_key IN ('order.paid', 'order.cancelled', 'order.expired', 'order.fulfilled')
                 AND o.status = e.event_type AND COALESCE(r.state, '') <> CASE o.status
                     WHEN 'paid' THEN 'committed' WHEN 'fulfilled' THEN 'fulfilled' ELSE 'released' END",
    },
    Check {
        name: "reserved-as-ordered",
        promise: "a reservation holds what its order asked for, no more and no less",
        offenders: "SELECT o.number AS subject FROM {orders} o
             JOIN inventory_reservations r ON r.group_id = o.group_id AND r.order_id = o.id AND r.state <> 'released'
             WHERE (SELECT count(*) FROM inventory_reservation_lines l
                     WHERE l.group_id = r.group_id AND l.reservation_id = r.id)
                 <> (SELECT count(DISTINCT i.sku) FROM orders_lines i
                     WHERE i.group_id = o.group_id AND i.order_id = o.id)
                 OR EXISTS (SELECT 1 FROM inventory_reservation_lines l
                     WHERE l.group_id = r.group_id AND l.reservation_id = r.id AND l.quantity <> (
                         SELECT COALESCE(sum(i.quantity), 0) FROM orders_lines i
                         WHERE i.group_id = o.group_id AND i.order_id = o.id AND i.sku = l.sku))",
    },
    Check {
        name: "totals-add-up",
        promise: "an order's total is the sum of its lines",
        offenders: "SELECT o.number AS subject FROM {orders} o
             LEFT JOIN orders_lines i ON i.group_id = o.group_id AND i.order_id = o.id
             GROUP BY o.group_id, o.id, o.number, o.total_minor
             HAVING count(i.line) = 0 OR sum(i.quantity * i.unit_price_minor) <> o.total_minor",
    },
    Check {
        name: "keys-have-orders",
        promise: "an idempotency key that was used names an order that is there",
        offenders: "SELECT k.key AS subject FROM {keys} k WHERE NOT EXISTS (
                 SELECT 1 FROM orders_orders o WHERE o.group_id = k.group_id AND o.id = k.order_id)",
    },
    Check {
        name: "one-order-per-key",
        promise: "an idempotency key names one order",
        offenders: "SELECT k.key AS subject FROM {keys} k
             JOIN orders_idempotency j ON j.group_id = k.group_id AND j.route = k.route AND j.key = k.key
             GROUP BY k.group_id, k.route, k.key HAVING count(*) > 1",
    },
    Check {
        name: "reservations-have-causes",
        promise: "a reservation names the event that caused it, and inventory has dealt with that",
        offenders: "SELECT r.number AS subject FROM {reservations} r
             WHERE r.created_at >= {forgotten verdicts} AND NOT EXISTS (
                 SELECT 1 FROM messaging_inbox i
                 WHERE i.consumer = 'inventory' AND i.event_id = r.cause_event_id AND i.state = 'processed')",
    },
    Check {
        name: "notices-have-causes",
        promise: "a notice names the event that caused it, and notifications have dealt with that",
        offenders: "SELECT {text of n.id} AS subject FROM {notices} n
             WHERE n.created_at >= {forgotten verdicts} AND n.state = 'sent' AND NOT EXISTS (
                 SELECT 1 FROM messaging_inbox i
                 WHERE i.consumer = 'notifications' AND i.event_id = n.event_id AND i.state = 'processed')",
    },
    Check {
        name: "one-effect-per-event",
        promise: "an event causes one reservation at most, and one notice by each channel",
        offenders: "SELECT {text of r.cause_event_id} AS subject FROM {reservations} r
             GROUP BY r.group_id, r.cause_event_id HAVING count(*) > 1
             UNION ALL SELECT {text of n.event_id} FROM {notices} n
             GROUP BY n.group_id, n.event_id, n.channel HAVING count(*) > 1",
    },
    Check {
        name: "one-notice-per-outcome",
        promise: "an outcome that notifications have dealt with has its notice",
        offenders: "SELECT e.aggregate_id || ' ' || e.event_type AS subject FROM {events} e
             JOIN messaging_inbox i ON i.consumer = 'notifications' AND i.event_id = e.event_id
                 AND i.state = 'processed' AND i.reason IS NULL
             WHERE e.routing_key IN ('inventory.reserved', 'inventory.failed', 'order.paid', 'order.cancelled',
                     'order.expired')
                 AND NOT EXISTS (SELECT 1 FROM notifications_notices n
                     WHERE n.group_id = e.group_id AND n.order_id = {uuid of e.aggregate_id}
                         AND n.kind = CASE e.event_type WHEN 'failed' THEN 'rejected' ELSE e.event_type END)",
    },
    Check {
        name: "books-balance",
        promise: "a payment has two entries, and they sum to zero",
        offenders: "SELECT {text of l.event_id} AS subject FROM (SELECT DISTINCT event_id FROM {entries} e) p
             JOIN ledger_entries l ON l.event_id = p.event_id GROUP BY l.event_id HAVING count(*) <> 2 OR sum(l.amount_minor) <> 0 OR count(DISTINCT l.currency) <> 1",
    },
    Check {
        name: "one-booking-per-order",
        promise: "an order's payment is booked once, from the payment that its books name",
        offenders: "SELECT DISTINCT {text of l.order_id} AS subject FROM {entries} l
             LEFT JOIN ledger_orders b ON b.group_id = l.group_id AND b.order_id = l.order_id
                 AND b.paid_event_id = l.event_id
             WHERE b.order_id IS NULL",
    },
    Check {
        name: "entries-have-causes",
        promise: "an entry names the payment that caused it, and the ledger has dealt with that",
        offenders: "SELECT {text of l.id} AS subject FROM {entries} l
             WHERE l.created_at >= {forgotten verdicts} AND NOT EXISTS (
                 SELECT 1 FROM messaging_inbox i
                 WHERE i.consumer = 'ledger' AND i.event_id = l.event_id AND i.state = 'processed')",
    },
    Check {
        name: "one-credit-per-payment",
        promise: "a payment that the ledger has dealt with is booked, at its order's total",
        offenders: "SELECT o.number AS subject FROM {events} e
             JOIN messaging_inbox i ON i.consumer = 'ledger' AND i.event_id = e.event_id
                 AND i.state = 'processed' AND i.reason IS NULL
             JOIN orders_orders o ON o.group_id = e.group_id AND o.id = {uuid of e.aggregate_id}
             WHERE e.routing_key = 'order.paid' AND o.total_minor
                 <> (SELECT COALESCE(sum(abs(l.amount_minor)), 0) FROM ledger_entries l
                     WHERE l.event_id = e.event_id AND l.account = 'cash' AND l.currency = o.currency)",
    },
    Check {
        name: "only-paid-orders-are-booked",
        promise: "an order with entries in the ledger is paid",
        offenders: "SELECT o.number AS subject FROM {orders} o
             WHERE o.status NOT IN ('paid', 'fulfilled') AND EXISTS (
                 SELECT 1 FROM ledger_entries l WHERE l.group_id = o.group_id AND l.order_id = o.id)",
    },
    Check {
        name: "no-wake-up-lost",
        promise: "an event that was kept is run once its predecessor has been",
        // One that is left to the sweep is due before its deadline.
        offenders: "SELECT i.consumer || ' ' || {text of i.event_id} AS subject FROM messaging_inbox i
             WHERE i.state = 'waiting' AND i.lease_until = i.deadline_at AND
                 {event where a.aggregate_type = {type in i.waiting_for} AND a.aggregate_id = i.aggregate_id
                     AND a.group_id = i.group_id
                     AND a.aggregate_type || '.' || a.event_type || ' ' || a.aggregate_id = i.waiting_for
                     AND EXISTS (SELECT 1 FROM messaging_inbox p
                         WHERE p.consumer = i.consumer AND p.event_id = a.id AND p.state = 'processed')}",
    },
    Check {
        name: "nothing-waits-for-ever",
        promise: "a consumer that has been at work past an event's deadline has run or rejected it",
        offenders: "SELECT i.consumer || ' ' || {text of i.event_id} AS subject FROM messaging_inbox i
             WHERE i.state = 'waiting' AND (
                 SELECT max(j.finished_at) - min(j.finished_at) FROM messaging_inbox j
                 WHERE j.consumer = i.consumer AND j.finished_at > i.deadline_at) > {minutes 5}",
    },
    Check {
        name: "nothing-unpublishable",
        promise: "no event was given up on by the relay",
        offenders: "SELECT {text of e.id} AS subject FROM messaging_outbox e WHERE e.status = 'dead'",
    },
];

/// An event that went out and that a consumer, bound to its type by then, neither met nor left a letter about. Takes the
/// consumer, the routing key, since when the consumer is bound to it, and until when what was published can no longer be
/// on its way.
pub const LOST: &str = "SELECT {text of e.event_id} AS subject FROM {events} e
     WHERE e.status = 'published' AND e.routing_key = $6 AND e.published_at >= $7 AND e.published_at < $8
         AND NOT EXISTS (SELECT 1 FROM messaging_inbox i WHERE i.consumer = $5 AND i.event_id = e.event_id)
         AND NOT EXISTS (SELECT 1 FROM messaging_dead_letters d
             WHERE d.consumer = $5 AND d.message_id = {text of e.event_id})";

/// An event that a consumer met and is not done with, though nothing is left that would bring it back: its retry was due
/// or its run over so long ago that a message about it must have been settled since, and there is no letter. Takes the
/// consumer, and until when what was sent can no longer be on its way.
pub const STRANDED: &str = "SELECT {text of i.event_id} AS subject FROM messaging_inbox i
     WHERE i.consumer = $5 AND i.state <> 'processed' AND i.state IN ('retrying', 'processing')
         AND CASE WHEN i.state = 'processing' AND i.lock_token IS NULL THEN i.started_at ELSE i.lease_until END < $6
         AND NOT EXISTS (SELECT 1 FROM messaging_outbox c WHERE c.event_id = i.event_id AND c.kind <> 'event'
             AND (c.status <> 'published' OR c.published_at >= $6))
         AND NOT EXISTS (SELECT 1 FROM messaging_dead_letters d WHERE d.event_id = i.event_id
             AND d.consumer = i.consumer AND d.state <> 'redriven' AND d.reason <> 'id-reused')";

/// An event that a consumer gave up on and that has no letter. Takes the consumer, and until when what was rejected can
/// no longer be on its way to the office.
pub const UNFILED: &str = "SELECT {text of i.event_id} AS subject FROM messaging_inbox i
     WHERE i.consumer = $5 AND i.state <> 'processed' AND i.state = 'dead' AND i.finished_at < $6
         AND i.finished_at >= {forgotten letters}
         AND NOT EXISTS (SELECT 1 FROM messaging_dead_letters d
             WHERE d.event_id = i.event_id AND d.consumer = i.consumer)";
