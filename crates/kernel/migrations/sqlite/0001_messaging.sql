-- The kernel's tables. Ids are 16-byte blobs, times are milliseconds, and bodies are stored as they arrived.
-- CHECKs use `=` instead of IN: SQLite builds a temporary table for IN on each insert.

-- `seq` is the row's place on disk: small and growing, it is how a batch is named within one transaction.
CREATE TABLE messaging_outbox (
    seq            INTEGER PRIMARY KEY,
    id             BLOB    NOT NULL UNIQUE,
    event_id       BLOB    NOT NULL,
    kind           TEXT    NOT NULL CHECK (kind = 'event' OR kind = 'retry' OR kind = 'redrive' OR kind = 'replay'),
    group_id       TEXT    NOT NULL,
    subsidiary_id  TEXT,
    aggregate_type TEXT    NOT NULL,
    aggregate_id   TEXT    NOT NULL,
    event_type     TEXT    NOT NULL,
    headers        TEXT    NOT NULL,
    status         TEXT    NOT NULL CHECK (status = 'published' OR status = 'pending' OR status = 'failed' OR status = 'dead'),
    available_at   INTEGER NOT NULL,
    claimed_at     INTEGER,
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
-- Retries, redrives and replays by their event; a first publication is found by its id.
CREATE INDEX messaging_outbox_copies ON messaging_outbox (event_id) WHERE kind <> 'event';

-- Events published long ago. Replays read them too.
CREATE TABLE messaging_outbox_archive (
    id             BLOB    NOT NULL PRIMARY KEY,
    group_id       TEXT    NOT NULL,
    subsidiary_id  TEXT,
    aggregate_type TEXT    NOT NULL,
    aggregate_id   TEXT    NOT NULL,
    event_type     TEXT    NOT NULL,
    headers        TEXT    NOT NULL,
    attempts       INTEGER NOT NULL,
    created_at     INTEGER NOT NULL,
    claimed_at     INTEGER,
    published_at   INTEGER,
    correlation_id TEXT    NOT NULL,
    causation_id   BLOB,
    traceparent    TEXT,
    body           BLOB    NOT NULL
) STRICT;
CREATE INDEX messaging_outbox_archive_aggregate ON messaging_outbox_archive (aggregate_type, aggregate_id);

CREATE TABLE messaging_inbox (
    consumer        TEXT    NOT NULL,
    event_id        BLOB    NOT NULL,
    state           TEXT    NOT NULL CHECK (
        state = 'processed' OR state = 'processing' OR state = 'waiting' OR state = 'retrying' OR state = 'dead'),
    attempts        INTEGER NOT NULL,
    unfinished_runs INTEGER NOT NULL DEFAULT 0,
    duplicates      INTEGER NOT NULL DEFAULT 0,
    started_at      INTEGER NOT NULL,
    finished_at     INTEGER,
    lock_token      BLOB,
    lease_until     INTEGER,
    version         INTEGER NOT NULL DEFAULT 0,
    -- Writes about an external effect that came after another instance had taken it over, and were refused.
    fenced          INTEGER NOT NULL DEFAULT 0,
    event_type      TEXT    NOT NULL,
    aggregate_id    TEXT    NOT NULL,
    correlation_id  TEXT    NOT NULL,
    group_id        TEXT    NOT NULL,
    traceparent     TEXT,
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
-- Waiting events are found by what they wait for and by their deadline.
CREATE INDEX messaging_inbox_waiting ON messaging_inbox (consumer, waiting_for) WHERE state = 'waiting';
CREATE INDEX messaging_inbox_due ON messaging_inbox (consumer, lease_until) WHERE state = 'waiting';
-- Old rows are found by the time in their UUIDv7. Foreign ids may have none, so only those are indexed by time.
CREATE INDEX messaging_inbox_foreign ON messaging_inbox (finished_at) WHERE substr(event_id, 7, 1) NOT BETWEEN x'70' AND x'7f';

CREATE TABLE messaging_dead_letters (
    id             BLOB    NOT NULL PRIMARY KEY,
    queue          TEXT    NOT NULL,
    consumer       TEXT    NOT NULL,
    message_id     TEXT,
    -- The event in its body, if that can be read: the event's inbox row is kept as long as the letter.
    event_id       BLOB,
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
    resolved_at    INTEGER,
    -- The job that redrove it, if it was not redriven by itself.
    job_id         BLOB,
    UNIQUE (queue, delivery_key)
) STRICT;
CREATE UNIQUE INDEX messaging_dead_letters_open ON messaging_dead_letters (queue, filing_key) WHERE state = 'open';
CREATE INDEX messaging_dead_letters_event ON messaging_dead_letters (event_id, consumer);
CREATE INDEX messaging_dead_letters_resolved ON messaging_dead_letters (resolved_at) WHERE state <> 'open';
-- Covers the groups of letters: no body is read to count them.
CREATE INDEX messaging_dead_letters_groups
    ON messaging_dead_letters (state, consumer, reason, event_type, queue, created_at, updated_at);
CREATE INDEX messaging_dead_letters_by_message ON messaging_dead_letters (message_id);
CREATE INDEX messaging_dead_letters_by_reason ON messaging_dead_letters (consumer, reason) WHERE state = 'open';

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

-- Messages that one transaction handed to a consumer of its own process, in one row: their outbox rows as a JSON array, by
-- which whoever finds the row when its lease is over puts them into the queue, each for itself.
CREATE TABLE messaging_bundles (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    queue       TEXT    NOT NULL,
    outbox_refs TEXT    NOT NULL,
    enqueued_at INTEGER NOT NULL,
    lock_token  BLOB    NOT NULL,
    lease_until INTEGER NOT NULL
) STRICT;

-- The routing keys of each queue. An event is owed to a consumer if its queue was bound to the event's key by then.
CREATE TABLE messaging_bindings (
    routing_key TEXT    NOT NULL,
    queue       TEXT    NOT NULL,
    since       INTEGER NOT NULL,
    PRIMARY KEY (routing_key, queue)
) STRICT, WITHOUT ROWID;

-- Queues found missing on the broker, recorded before they are declared: what they lost is still to be sent again. `id` is
-- new each time.
CREATE TABLE messaging_resyncs (
    queue TEXT NOT NULL PRIMARY KEY,
    id    BLOB NOT NULL
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

-- What operators did, when and why. `group_id` is null for actions on every group.
CREATE TABLE messaging_actions (
    id         BLOB    NOT NULL PRIMARY KEY,
    who        TEXT    NOT NULL,
    group_id   TEXT,
    action     TEXT    NOT NULL,
    subject    TEXT    NOT NULL,
    why        TEXT,
    details    TEXT    NOT NULL,
    request_id TEXT    NOT NULL,
    created_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX messaging_actions_subject ON messaging_actions (subject, id);

-- Work that outlives a request: redrives and replays. A batch of it and its progress are one commit.
CREATE TABLE messaging_jobs (
    id              BLOB    NOT NULL PRIMARY KEY,
    kind            TEXT    NOT NULL CHECK (kind IN ('redrive', 'replay')),
    group_id        TEXT,
    state           TEXT    NOT NULL CHECK (state IN ('running', 'done', 'stopped', 'failed')),
    criteria        TEXT    NOT NULL,
    rate            INTEGER NOT NULL CHECK (rate > 0),
    total           INTEGER NOT NULL,
    sent            INTEGER NOT NULL DEFAULT 0,
    already_applied INTEGER NOT NULL DEFAULT 0,
    skipped         INTEGER NOT NULL DEFAULT 0,
    refused         INTEGER NOT NULL DEFAULT 0,
    -- How far a replay has come.
    reached         BLOB,
    next_at         INTEGER NOT NULL,
    who             TEXT    NOT NULL,
    why             TEXT,
    last_error      TEXT,
    created_at      INTEGER NOT NULL,
    finished_at     INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX messaging_jobs_running ON messaging_jobs (next_at) WHERE state = 'running';

-- What a redrive has still to do: the letters that were open when it was asked for.
CREATE TABLE messaging_job_letters (
    job_id    BLOB NOT NULL,
    letter_id BLOB NOT NULL,
    PRIMARY KEY (job_id, letter_id)
) STRICT, WITHOUT ROWID;

-- The processes that run, renewed while they do. `loops`: how each of a process's loops says it is doing, as JSON.
CREATE TABLE messaging_instances (
    id         BLOB    NOT NULL PRIMARY KEY,
    address    TEXT    NOT NULL,
    version    TEXT    NOT NULL,
    started_at INTEGER NOT NULL,
    seen_at    INTEGER NOT NULL,
    loops      TEXT    NOT NULL
) STRICT;

-- What retention has removed for good. Checks for missing rows look only at rows after `until`. An unknown event from before
-- `removed_until` may have been processed; null while nothing has been removed.
CREATE TABLE messaging_forgotten (
    what          TEXT NOT NULL PRIMARY KEY CHECK (what IN ('events', 'verdicts', 'letters')),
    until         INTEGER NOT NULL,
    removed_until INTEGER
) STRICT, WITHOUT ROWID;
INSERT INTO messaging_forgotten (what, until)
SELECT value, CAST(unixepoch('subsec') * 1000 AS INTEGER) FROM json_each('["events", "verdicts", "letters"]');
