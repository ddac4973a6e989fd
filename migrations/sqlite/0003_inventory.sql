CREATE TABLE inventory_stock (
    group_id   TEXT    NOT NULL,
    sku        TEXT    NOT NULL,
    on_hand    INTEGER NOT NULL CHECK (on_hand >= 0),
    reserved   INTEGER NOT NULL DEFAULT 0 CHECK (reserved >= 0),
    fulfilled  INTEGER NOT NULL DEFAULT 0 CHECK (fulfilled >= 0),
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (group_id, sku),
    -- Never oversold.
    CONSTRAINT inventory_stock_available CHECK (reserved <= on_hand)
) STRICT, WITHOUT ROWID;

CREATE TABLE inventory_adjustments (
    group_id   TEXT    NOT NULL,
    id         BLOB    NOT NULL,
    sku        TEXT    NOT NULL,
    delta      INTEGER NOT NULL,
    reason     TEXT    NOT NULL,
    on_hand    INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (group_id, id)
) STRICT, WITHOUT ROWID;

CREATE TABLE inventory_reservations (
    group_id       TEXT    NOT NULL,
    id             BLOB    NOT NULL,
    number         TEXT    NOT NULL,
    order_id       BLOB    NOT NULL,
    state          TEXT    NOT NULL CHECK (state = 'held' OR state = 'committed' OR state = 'fulfilled' OR state = 'released'),
    cause_event_id BLOB    NOT NULL,
    created_at     INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL,
    PRIMARY KEY (group_id, id),
    CONSTRAINT inventory_reservations_order UNIQUE (group_id, order_id),
    CONSTRAINT inventory_reservations_number UNIQUE (group_id, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE inventory_reservation_lines (
    group_id       TEXT    NOT NULL,
    reservation_id BLOB    NOT NULL,
    sku            TEXT    NOT NULL,
    quantity       INTEGER NOT NULL CHECK (quantity > 0),
    PRIMARY KEY (group_id, reservation_id, sku)
) STRICT, WITHOUT ROWID;
