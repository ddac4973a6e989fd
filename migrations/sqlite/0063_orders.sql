-- When holds end, beside the orders, as on Postgres: see there.
CREATE TABLE orders_holds (
    expires_at INTEGER NOT NULL,
    order_id   BLOB    NOT NULL,
    group_id   TEXT    NOT NULL,
    PRIMARY KEY (expires_at, order_id)
) STRICT, WITHOUT ROWID;
INSERT INTO orders_holds (expires_at, order_id, group_id)
    SELECT hold_expires_at, id, group_id FROM orders_orders WHERE status = 'reserved' AND hold_expires_at IS NOT NULL;
DROP INDEX orders_orders_hold;
