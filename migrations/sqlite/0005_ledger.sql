-- Orders known to the ledger. The first event of an order inserts its row, and later ones lock it. `placed_at` is null until
-- the order itself arrives; `paid_event_id` is the payment that was booked.
CREATE TABLE ledger_orders (
    group_id      TEXT NOT NULL,
    order_id      BLOB NOT NULL,
    placed_at     INTEGER,
    paid_event_id BLOB,
    PRIMARY KEY (group_id, order_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE ledger_entries (
    group_id     TEXT    NOT NULL,
    id           BLOB    NOT NULL,
    order_id     BLOB    NOT NULL,
    event_id     BLOB    NOT NULL,
    account      TEXT    NOT NULL,
    amount_minor INTEGER NOT NULL CHECK (amount_minor <> 0),
    currency     TEXT    NOT NULL,
    created_at   INTEGER NOT NULL,
    PRIMARY KEY (group_id, id),
    -- A payment is booked once.
    CONSTRAINT ledger_entries_once UNIQUE (event_id, account)
) STRICT, WITHOUT ROWID;
CREATE INDEX ledger_entries_account ON ledger_entries (group_id, account, id);
CREATE INDEX ledger_entries_order ON ledger_entries (group_id, order_id);
