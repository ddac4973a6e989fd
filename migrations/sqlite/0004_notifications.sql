CREATE TABLE notifications_notices (
    group_id   TEXT    NOT NULL,
    id         BLOB    NOT NULL,
    order_id   BLOB    NOT NULL,
    kind       TEXT    NOT NULL CHECK (
        kind = 'reserved' OR kind = 'rejected' OR kind = 'paid' OR kind = 'cancelled' OR kind = 'expired'),
    channel    TEXT    NOT NULL,
    state      TEXT    NOT NULL CHECK (
        state = 'sent' OR state = 'sending' OR state = 'pending' OR state = 'failed' OR state = 'unknown'),
    event_id   BLOB    NOT NULL,
    -- An attempt to send it has ended with an unknown outcome.
    in_doubt   INTEGER NOT NULL DEFAULT 0,
    -- Why it is not sent.
    last_error TEXT,
    created_at INTEGER NOT NULL,
    -- Since when it is in its state; null since it was created.
    updated_at INTEGER,
    PRIMARY KEY (group_id, id),
    -- One notice per outcome.
    CONSTRAINT notifications_notices_once UNIQUE (group_id, order_id, kind)
) STRICT, WITHOUT ROWID;
