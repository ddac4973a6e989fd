-- The kernel's tables. Ids are 16-byte blobs, times whole milliseconds, bodies the bytes they are.

-- `seq` is the row's place on disk: small and growing, it is how a batch is named within one transaction.
CREATE TABLE messaging_outbox (
    seq            INTEGER PRIMARY KEY,
    id             BLOB    NOT NULL UNIQUE,
    event_id       BLOB    NOT NULL,
    kind           TEXT    NOT NULL CHECK (kind IN ('event', 'retry', 'redrive', 'replay')),
    group_id       TEXT    NOT NULL,
    subsidiary_id  TEXT,
    aggregate_type TEXT    NOT NULL,
    aggregate_id   TEXT    NOT NULL,
    event_type     TEXT    NOT NULL,
    headers        TEXT    NOT NULL,
    status         TEXT    NOT NULL CHECK (status IN ('pending', 'published', 'failed', 'dead')),
    available_at   INTEGER NOT NULL,
    claimed_by     BLOB,
    attempts       INTEGER NOT NULL DEFAULT 0,
    created_at     INTEGER NOT NULL,
    published_at   INTEGER,
    correlation_id TEXT    NOT NULL,
    causation_id   BLOB,
    traceparent    TEXT,
    target         TEXT    NOT NULL DEFAULT '',
    last_error     TEXT,
    body           BLOB    NOT NULL
) STRICT;
CREATE INDEX messaging_outbox_due ON messaging_outbox (available_at) WHERE status IN ('pending', 'failed');
CREATE INDEX messaging_outbox_dead ON messaging_outbox (id) WHERE status = 'dead';
CREATE INDEX messaging_outbox_aggregate ON messaging_outbox (aggregate_type, aggregate_id);

CREATE TABLE messaging_inbox (
    consumer        TEXT    NOT NULL,
    event_id        BLOB    NOT NULL,
    state           TEXT    NOT NULL CHECK (state IN ('processing', 'processed', 'waiting', 'retrying', 'dead')),
    attempts        INTEGER NOT NULL,
    unfinished_runs INTEGER NOT NULL DEFAULT 0,
    duplicates      INTEGER NOT NULL DEFAULT 0,
    started_at      INTEGER NOT NULL,
    finished_at     INTEGER,
    lock_token      BLOB,
    lease_until     INTEGER,
    version         INTEGER NOT NULL DEFAULT 0,
    event_type      TEXT    NOT NULL,
    aggregate_id    TEXT    NOT NULL,
    correlation_id  TEXT    NOT NULL,
    group_id        TEXT    NOT NULL,
    body_hash       BLOB    NOT NULL,
    reason          TEXT,
    last_error      TEXT,
    body            BLOB,
    waiting_for     TEXT,
    deadline_at     INTEGER,
    PRIMARY KEY (consumer, event_id)
) STRICT, WITHOUT ROWID;
CREATE INDEX messaging_inbox_unsettled ON messaging_inbox (consumer, state, event_id) WHERE state <> 'processed';
CREATE INDEX messaging_inbox_duplicates ON messaging_inbox (consumer, event_id) WHERE duplicates > 0;

CREATE TABLE messaging_dead_letters (
    id             BLOB    NOT NULL PRIMARY KEY,
    queue          TEXT    NOT NULL,
    consumer       TEXT    NOT NULL,
    message_id     TEXT,
    event_type     TEXT,
    correlation_id TEXT,
    group_id       TEXT,
    reason         TEXT    NOT NULL,
    error          TEXT    NOT NULL,
    attempts       INTEGER NOT NULL,
    headers        TEXT    NOT NULL,
    body           BLOB    NOT NULL,
    x_death        TEXT    NOT NULL,
    count          INTEGER NOT NULL DEFAULT 1,
    state          TEXT    NOT NULL CHECK (state IN ('open', 'redriven', 'discarded')),
    -- What makes two filings the same letter while it is open: the event a verdict was on, else the delivery.
    filing_key     TEXT    NOT NULL,
    -- The rejected delivery filed last; filing the same one again changes nothing.
    delivery_key   TEXT    NOT NULL,
    created_at     INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL,
    UNIQUE (queue, delivery_key)
) STRICT;
CREATE UNIQUE INDEX messaging_dead_letters_open ON messaging_dead_letters (queue, filing_key) WHERE state = 'open';

-- A message from the outbox is a reference to its row there; one from elsewhere brings its own columns. So rows
-- stay narrow: claiming and deleting them writes few pages.
-- AUTOINCREMENT: a delivery's id is never given to another message, so that a late ack cannot hit a stranger.
CREATE TABLE messaging_queue (
    id             INTEGER PRIMARY KEY AUTOINCREMENT,
    queue          TEXT    NOT NULL,
    outbox_ref     INTEGER,
    message_id     TEXT,
    routing_key    TEXT,
    correlation_id TEXT,
    headers        TEXT,
    x_death        TEXT,
    enqueued_at    INTEGER NOT NULL,
    lock_token     BLOB,
    lease_until    INTEGER,
    deliveries     INTEGER NOT NULL DEFAULT 0,
    body           BLOB,
    CHECK ((outbox_ref IS NULL) <> (body IS NULL))
) STRICT;
CREATE INDEX messaging_queue_by_queue ON messaging_queue (queue, id);

CREATE TABLE messaging_bindings (
    queue       TEXT NOT NULL,
    routing_key TEXT NOT NULL,
    PRIMARY KEY (routing_key, queue)
) STRICT, WITHOUT ROWID;

-- Who takes from which queue, renewed while it does.
CREATE TABLE messaging_subscriptions (
    id      BLOB    NOT NULL PRIMARY KEY,
    queue   TEXT    NOT NULL,
    seen_at INTEGER NOT NULL
) STRICT;

CREATE TABLE messaging_pauses (
    name      TEXT    NOT NULL PRIMARY KEY,
    paused_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
