-- Orders the ledger has heard of. A row is there as soon as any event of the order has come, to be locked by the next;
-- `placed_at` tells whether the order itself has, `paid_event_id` which payment was booked.
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
    -- A payment is booked once, whatever the code believes.
    CONSTRAINT ledger_entries_once UNIQUE (event_id, account)
) STRICT, WITHOUT ROWID;
CREATE INDEX ledger_entries_account ON ledger_entries (group_id, account, id);
CREATE INDEX ledger_entries_order ON ledger_entries (group_id, order_id);
