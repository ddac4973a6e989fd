CREATE TABLE notifications_notices (
    group_id   TEXT    NOT NULL,
    id         BLOB    NOT NULL,
    order_id   BLOB    NOT NULL,
    kind       TEXT    NOT NULL CHECK (kind IN ('reserved', 'rejected', 'paid', 'cancelled', 'expired')),
    channel    TEXT    NOT NULL,
    state      TEXT    NOT NULL CHECK (state IN ('pending', 'sending', 'sent', 'failed', 'unknown')),
    event_id   BLOB    NOT NULL,
    created_at INTEGER NOT NULL,
    PRIMARY KEY (group_id, id),
    -- One notice per outcome, whoever asks for it and however often.
    CONSTRAINT notifications_notices_once UNIQUE (group_id, order_id, kind)
) STRICT, WITHOUT ROWID;
