-- When holds end, beside the orders: an index on a column that changes would make every step of an order cost an entry in
-- each of its indexes. Without one, and with room on its page, a new version of a row costs none.
CREATE TABLE orders_holds (
    expires_at timestamptz NOT NULL,
    order_id   uuid        NOT NULL,
    group_id   text        NOT NULL,
    PRIMARY KEY (expires_at, order_id)
);
INSERT INTO orders_holds (expires_at, order_id, group_id)
    SELECT hold_expires_at, id, group_id FROM orders_orders WHERE status = 'reserved' AND hold_expires_at IS NOT NULL;
DROP INDEX orders_orders_hold;
ALTER TABLE orders_orders SET (fillfactor = 50);
