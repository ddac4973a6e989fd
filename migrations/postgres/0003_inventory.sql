CREATE TABLE inventory_stock (
    group_id   text        NOT NULL,
    sku        text        NOT NULL,
    on_hand    bigint      NOT NULL CHECK (on_hand >= 0),
    reserved   bigint      NOT NULL DEFAULT 0 CHECK (reserved >= 0),
    fulfilled  bigint      NOT NULL DEFAULT 0 CHECK (fulfilled >= 0),
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (group_id, sku),
    -- Never oversold.
    CONSTRAINT inventory_stock_available CHECK (reserved <= on_hand)
) WITH (fillfactor = 50);

CREATE TABLE inventory_adjustments (
    group_id   text        NOT NULL,
    id         uuid        NOT NULL,
    sku        text        NOT NULL,
    delta      bigint      NOT NULL,
    reason     text        NOT NULL,
    on_hand    bigint      NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (group_id, id)
);

CREATE TABLE inventory_reservations (
    group_id       text        NOT NULL,
    id             uuid        NOT NULL,
    number         text        NOT NULL,
    order_id       uuid        NOT NULL,
    state          text        NOT NULL CHECK (state IN ('held', 'committed', 'fulfilled', 'released')),
    cause_event_id uuid        NOT NULL,
    created_at     timestamptz NOT NULL,
    updated_at     timestamptz NOT NULL,
    PRIMARY KEY (group_id, id),
    CONSTRAINT inventory_reservations_order UNIQUE (group_id, order_id),
    CONSTRAINT inventory_reservations_number UNIQUE (group_id, number)
);

CREATE TABLE inventory_reservation_lines (
    group_id       text   NOT NULL,
    reservation_id uuid   NOT NULL,
    sku            text   NOT NULL,
    quantity       bigint NOT NULL CHECK (quantity > 0),
    PRIMARY KEY (group_id, reservation_id, sku)
);
