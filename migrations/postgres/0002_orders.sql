CREATE TABLE orders_orders (
    group_id        text        NOT NULL,
    id              uuid        NOT NULL,
    subsidiary_id   text,
    number          text        NOT NULL,
    customer_id     text        NOT NULL,
    status          text        NOT NULL
        CHECK (status IN ('placed', 'reserved', 'rejected', 'paid', 'cancelled', 'expired', 'fulfilled')),
    reason          text,
    currency        text        NOT NULL,
    total_minor     bigint      NOT NULL CHECK (total_minor >= 0),
    correlation_id  text        NOT NULL,
    created_at      timestamptz NOT NULL,
    updated_at      timestamptz NOT NULL,
    hold_expires_at timestamptz,
    PRIMARY KEY (group_id, id),
    CONSTRAINT orders_orders_number UNIQUE (group_id, number)
) WITH (fillfactor = 50);

CREATE TABLE orders_lines (
    group_id         text    NOT NULL,
    order_id         uuid    NOT NULL,
    line             integer NOT NULL,
    sku              text    NOT NULL,
    quantity         bigint  NOT NULL CHECK (quantity > 0),
    unit_price_minor bigint  NOT NULL CHECK (unit_price_minor >= 0),
    PRIMARY KEY (group_id, order_id, line)
);

CREATE TABLE orders_idempotency (
    group_id    text        NOT NULL,
    route       text        NOT NULL,
    key         text        NOT NULL,
    fingerprint bytea       NOT NULL,
    order_id    uuid        NOT NULL,
    created_at  timestamptz NOT NULL,
    PRIMARY KEY (group_id, route, key)
);
CREATE INDEX orders_idempotency_created ON orders_idempotency (created_at);

-- When holds end. A table of its own: an indexed column in `orders_orders` would make every update of an order write all
-- of the table's indexes.
CREATE TABLE orders_holds (
    expires_at timestamptz NOT NULL,
    order_id   uuid        NOT NULL,
    group_id   text        NOT NULL,
    PRIMARY KEY (expires_at, order_id)
);
