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
);

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
