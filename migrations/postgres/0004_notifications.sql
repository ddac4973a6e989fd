CREATE TABLE notifications_notices (
    group_id   text        NOT NULL,
    id         uuid        NOT NULL,
    order_id   uuid        NOT NULL,
    kind       text        NOT NULL CHECK (kind IN ('reserved', 'rejected', 'paid', 'cancelled', 'expired')),
    channel    text        NOT NULL,
    state      text        NOT NULL CHECK (state IN ('pending', 'sending', 'sent', 'failed', 'unknown')),
    event_id   uuid        NOT NULL,
    -- An attempt to send it has ended with an unknown outcome.
    in_doubt   boolean     NOT NULL DEFAULT false,
    -- Why it is not sent.
    last_error text,
    created_at timestamptz NOT NULL,
    -- Since when it is in its state; null since it was created.
    updated_at timestamptz,
    PRIMARY KEY (group_id, id),
    -- One notice per outcome.
    CONSTRAINT notifications_notices_once UNIQUE (group_id, order_id, kind)
);
