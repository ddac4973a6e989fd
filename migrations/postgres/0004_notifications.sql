CREATE TABLE notifications_notices (
    group_id   text        NOT NULL,
    id         uuid        NOT NULL,
    order_id   uuid        NOT NULL,
    kind       text        NOT NULL CHECK (kind IN ('reserved', 'rejected', 'paid', 'cancelled', 'expired')),
    channel    text        NOT NULL,
    state      text        NOT NULL CHECK (state IN ('pending', 'sending', 'sent', 'failed', 'unknown')),
    event_id   uuid        NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (group_id, id),
    -- One notice per outcome, whoever asks for it and however often.
    CONSTRAINT notifications_notices_once UNIQUE (group_id, order_id, kind)
);
