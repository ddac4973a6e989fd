-- Orders known to the ledger. The first event of an order inserts its row, and later ones lock it. `placed_at` is null until
-- the order itself arrives; `paid_event_id` is the payment that was booked.
CREATE TABLE ledger_orders (
    group_id      text        NOT NULL,
    order_id      uuid        NOT NULL,
    placed_at     timestamptz,
    paid_event_id uuid,
    PRIMARY KEY (group_id, order_id)
);

CREATE TABLE ledger_entries (
    group_id     text        NOT NULL,
    id           uuid        NOT NULL,
    order_id     uuid        NOT NULL,
    event_id     uuid        NOT NULL,
    account      text        NOT NULL,
    amount_minor bigint      NOT NULL CHECK (amount_minor <> 0),
    currency     text        NOT NULL,
    created_at   timestamptz NOT NULL,
    PRIMARY KEY (group_id, id),
    -- A payment is booked once.
    CONSTRAINT ledger_entries_once UNIQUE (event_id, account)
);
CREATE INDEX ledger_entries_account ON ledger_entries (group_id, account, id);
CREATE INDEX ledger_entries_order ON ledger_entries (group_id, order_id);
