-- The kernel's tables. Bodies are bytes, never jsonb: what arrived is kept as it arrived, whatever it holds.

CREATE TABLE messaging_outbox (
    id             uuid        PRIMARY KEY,
    event_id       uuid        NOT NULL,
    kind           text        NOT NULL CHECK (kind IN ('event', 'retry', 'redrive', 'replay')),
    group_id       text        NOT NULL,
    subsidiary_id  text,
    aggregate_type text        NOT NULL,
    aggregate_id   text        NOT NULL,
    event_type     text        NOT NULL,
    body           bytea       NOT NULL,
    headers        text        NOT NULL,
    status         text        NOT NULL CHECK (status IN ('pending', 'published', 'failed', 'dead')),
    available_at   timestamptz NOT NULL,
    claimed_by     uuid,
    attempts       integer     NOT NULL DEFAULT 0,
    created_at     timestamptz NOT NULL,
    published_at   timestamptz,
    correlation_id text        NOT NULL,
    causation_id   uuid,
    traceparent    text,
    target         text        NOT NULL DEFAULT '',
    last_error     text
);
CREATE INDEX messaging_outbox_due ON messaging_outbox (available_at) WHERE status IN ('pending', 'failed');
CREATE INDEX messaging_outbox_dead ON messaging_outbox (id) WHERE status = 'dead';
CREATE INDEX messaging_outbox_aggregate ON messaging_outbox (aggregate_type, aggregate_id);

CREATE TABLE messaging_inbox (
    consumer        text        NOT NULL,
    event_id        uuid        NOT NULL,
    state           text        NOT NULL CHECK (state IN ('processing', 'processed', 'waiting', 'retrying', 'dead')),
    attempts        integer     NOT NULL,
    unfinished_runs integer     NOT NULL DEFAULT 0,
    duplicates      integer     NOT NULL DEFAULT 0,
    started_at      timestamptz NOT NULL,
    finished_at     timestamptz,
    lock_token      uuid,
    lease_until     timestamptz,
    version         bigint      NOT NULL DEFAULT 0,
    event_type      text        NOT NULL,
    aggregate_id    text        NOT NULL,
    correlation_id  text        NOT NULL,
    group_id        text        NOT NULL,
    body_hash       bytea       NOT NULL,
    reason          text,
    last_error      text,
    body            bytea,
    waiting_for     text,
    deadline_at     timestamptz,
    PRIMARY KEY (consumer, event_id)
);
CREATE INDEX messaging_inbox_unsettled ON messaging_inbox (consumer, state, event_id) WHERE state <> 'processed';
CREATE INDEX messaging_inbox_duplicates ON messaging_inbox (consumer, event_id) WHERE duplicates > 0;

CREATE TABLE messaging_dead_letters (
    id             uuid        PRIMARY KEY,
    queue          text        NOT NULL,
    consumer       text        NOT NULL,
    message_id     text,
    event_type     text,
    correlation_id text,
    group_id       text,
    reason         text        NOT NULL,
    error          text        NOT NULL,
    attempts       integer     NOT NULL,
    headers        text        NOT NULL,
    body           bytea       NOT NULL,
    x_death        text        NOT NULL,
    count          integer     NOT NULL DEFAULT 1,
    state          text        NOT NULL CHECK (state IN ('open', 'redriven', 'discarded')),
    -- What makes two filings the same letter while it is open: the event a verdict was on, else the delivery.
    filing_key     text        NOT NULL,
    -- The rejected delivery filed last; filing the same one again changes nothing.
    delivery_key   text        NOT NULL,
    created_at     timestamptz NOT NULL,
    updated_at     timestamptz NOT NULL,
    UNIQUE (queue, delivery_key)
);
CREATE UNIQUE INDEX messaging_dead_letters_open ON messaging_dead_letters (queue, filing_key) WHERE state = 'open';

-- The table queue. A message from the outbox is a reference to its row there; one from elsewhere brings its own
-- columns. So rows stay narrow, and the claim updates no indexed column: with room on the page it is a cheap update.
CREATE TABLE messaging_queue (
    id             bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue          text        NOT NULL,
    outbox_ref     uuid,
    message_id     text,
    routing_key    text,
    correlation_id text,
    headers        text,
    body           bytea,
    x_death        text,
    enqueued_at    timestamptz NOT NULL,
    lock_token     uuid,
    lease_until    timestamptz,
    deliveries     integer     NOT NULL DEFAULT 0,
    CHECK ((outbox_ref IS NULL) <> (body IS NULL))
) WITH (fillfactor = 60, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX messaging_queue_by_queue ON messaging_queue (queue, id);

CREATE TABLE messaging_bindings (
    queue       text NOT NULL,
    routing_key text NOT NULL,
    PRIMARY KEY (routing_key, queue)
);

-- Who takes from which queue, renewed while it does.
CREATE TABLE messaging_subscriptions (
    id      uuid        PRIMARY KEY,
    queue   text        NOT NULL,
    seen_at timestamptz NOT NULL
);

CREATE TABLE messaging_pauses (
    name      text        PRIMARY KEY,
    paused_at timestamptz NOT NULL
);
