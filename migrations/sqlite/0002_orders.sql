CREATE TABLE orders_orders (
    group_id        TEXT    NOT NULL,
    id              BLOB    NOT NULL,
    subsidiary_id   TEXT,
    number          TEXT    NOT NULL,
    customer_id     TEXT    NOT NULL,
    status          TEXT    NOT NULL
        CHECK (status = 'placed' OR status = 'reserved' OR status = 'rejected' OR status = 'paid'
            OR status = 'cancelled' OR status = 'expired' OR status = 'fulfilled'),
    reason          TEXT,
    currency        TEXT    NOT NULL,
    total_minor     INTEGER NOT NULL CHECK (total_minor >= 0),
    correlation_id  TEXT    NOT NULL,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL,
    hold_expires_at INTEGER,
    PRIMARY KEY (group_id, id),
    CONSTRAINT orders_orders_number UNIQUE (group_id, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE orders_lines (
    group_id         TEXT    NOT NULL,
    order_id         BLOB    NOT NULL,
    line             INTEGER NOT NULL,
    sku              TEXT    NOT NULL,
    quantity         INTEGER NOT NULL CHECK (quantity > 0),
    unit_price_minor INTEGER NOT NULL CHECK (unit_price_minor >= 0),
    PRIMARY KEY (group_id, order_id, line)
) STRICT, WITHOUT ROWID;

CREATE TABLE orders_idempotency (
    group_id    TEXT    NOT NULL,
    route       TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    fingerprint BLOB    NOT NULL,
    order_id    BLOB    NOT NULL,
    created_at  INTEGER NOT NULL,
    PRIMARY KEY (group_id, route, key)
) STRICT, WITHOUT ROWID;
CREATE INDEX orders_idempotency_created ON orders_idempotency (created_at);

-- When holds end. A table of its own: an indexed column in `orders_orders` would make every update of an order write all
-- of the table's indexes.
CREATE TABLE orders_holds (
    expires_at INTEGER NOT NULL,
    order_id   BLOB    NOT NULL,
    group_id   TEXT    NOT NULL,
    PRIMARY KEY (expires_at, order_id)
) STRICT, WITHOUT ROWID;
